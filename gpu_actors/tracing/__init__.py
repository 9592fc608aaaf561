"""Records what a context does and when, for logs, OpenTelemetry and trace viewers."""

from gpu_actors.tracing.chrome import ChromeTrace
from gpu_actors.tracing.events import Trace, TraceEvent
from gpu_actors.tracing.host import HostSpan, host_span
from gpu_actors.tracing.streamed import StreamedTrace

__all__ = ["ChromeTrace", "HostSpan", "StreamedTrace", "Trace", "TraceEvent", "host_span"]
