"""What tests of other rooms take from inside `kv`."""

from gpu_actors.kv import requests, transfer
from gpu_actors.kv.page_map import page_map
from gpu_actors.kv.requests import CloseCache, CreateSequence, ForkSequence, FreeSequence, TruncateSequence
from gpu_actors.kv.sequences import CacheTables, GroupSize, first_page
from gpu_actors.kv.sharing import SharedPrefixes, shared_prefixes
