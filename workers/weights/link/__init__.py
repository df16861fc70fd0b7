"""The link that weights cross: the code that a trainer, our engines and foreign servers share.

Standard library and torch only, relative imports only: packed as `rlstreams_server` it runs inside
model servers (infra/server/README.md, which is also the contract).
"""

PROTOCOL = 3
