"""The link that weights cross: code that a trainer, our engines and foreign servers share.

Standard library and torch only (safetensors late, for versions in files), relative imports only:
packed as `rlstreams_server` it runs inside model servers (infra/server/README.md, the contract).
"""

PROTOCOL = 4
RECEIVE, DESCRIBE, CLAIM = KINDS = ("receive", "describe", "claim")  # of an order
