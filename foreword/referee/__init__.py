"""`foreword conform`: a referee for KV connectors of vLLM, and for the embedded engine.

| module       | contents                                                                          |
|--------------|-----------------------------------------------------------------------------------|
| `worker`     | one vLLM in a process of its own; a script that imports nothing of Foreword       |
| `models`     | small random models of many kinds, and prompts; also a script                     |
| `forks`      | a process that has imported vLLM and forks for each script                        |
| `process`    | starts such scripts and talks to them                                             |
| `damage`     | faults in a connector's files, other weights under a model's path                 |
| `session`    | what claims use: prompts, reference answers, the evidence                         |
| `reuse`, `identity`, `faults`, `schedules` | the claims                                          |
| `run`        | checks claims, prints the table, writes results and reproducers                   |
"""
