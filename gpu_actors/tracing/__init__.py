"""What a context did and when, for logs, OpenTelemetry and trace viewers.

Imports from no other room.
"""

from gpu_actors.tracing.chrome import ChromeTrace
from gpu_actors.tracing.events import Trace, TraceEvent

__all__ = ["ChromeTrace", "Trace", "TraceEvent"]
