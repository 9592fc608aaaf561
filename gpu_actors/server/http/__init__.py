"""Parts for a server around a context: bounds on requests and their bodies, admission, answers to errors, and probes.

docs/serving.md gives the reasons, and ``examples/inference_server.py`` shows it in use.
"""

from __future__ import annotations

from gpu_actors.server.http.access import Doors, Unauthorized
from gpu_actors.server.http.admission import Admission, AdmissionStats, Place
from gpu_actors.server.http.bodies import (
    Bodies,
    BodyTooLarge,
    BodyTooSlow,
    TooManyBodies,
    WrongContentType,
    read_json,
)
from gpu_actors.server.http.guard import Exchange, Guard
from gpu_actors.server.http.probes import EXIT_CODE, Answer, Probes
from gpu_actors.server.http.problems import NotFound, Problem, problem
from gpu_actors.server.http.scopes import client_of
from gpu_actors.server.http.shutdown import Farewell, leave_slowly
from gpu_actors.server.http.traffic import RouteCounts, Traffic

__all__ = [
    "EXIT_CODE",
    "Admission",
    "AdmissionStats",
    "Answer",
    "Bodies",
    "BodyTooLarge",
    "BodyTooSlow",
    "Doors",
    "Exchange",
    "Farewell",
    "Guard",
    "NotFound",
    "Place",
    "Probes",
    "Problem",
    "RouteCounts",
    "TooManyBodies",
    "Traffic",
    "Unauthorized",
    "WrongContentType",
    "client_of",
    "leave_slowly",
    "problem",
    "read_json",
]
