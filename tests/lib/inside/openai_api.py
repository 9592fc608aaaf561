"""What tests of other rooms take from inside `openai_api`."""

from gpu_actors.openai_api.state import State
