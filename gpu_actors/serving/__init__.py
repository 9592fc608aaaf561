"""What a server around a context needs: admission of requests, and probes that answer while it is busy.

``examples/inference_server.py`` shows both in use, docs/serving.md says why.

Imports from other rooms: runtime, validation.
"""

from __future__ import annotations

from gpu_actors.serving.admission import Admission, AdmissionStats
from gpu_actors.serving.probes import EXIT_CODE, Answer, Probes

__all__ = ["EXIT_CODE", "Admission", "AdmissionStats", "Answer", "Probes"]
