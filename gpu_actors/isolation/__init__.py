"""A context in a child process, which ``open_context(..., isolation="process")`` opens.

    the program's process                                     the context's process
    IsolatedContext                                           ContextWorker ── GpuContext, on the device
      └─ RpcClient ── Link ── PipeChannel ══ socket pair ══ PipeChannel ── Link ─┘
           │                      └───────── two memfds ───────┘
      Generations: starts a process, sees it end, starts the next one

`Link`, `RpcClient` and `ContextWorker` do not depend on processes: a `Channel` carries their records.
`docs/isolation.md` says what is lost when either process dies. Nothing here is imported before a context is opened with
isolation.
"""
