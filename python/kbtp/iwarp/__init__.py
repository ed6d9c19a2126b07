"""iWARP without I/O: MPA (RFC 5044, 6581), DDP (RFC 5041), RDMAP (RFC 5040) and its extensions (RFC 7306).

| module | what |
|---|---|
| `mpa` | the Request and Reply frames and their negotiation |
| `fpdu`, `crc32c` | MPA framing: lengths, padding, markers, CRC |
| `ddp` | tagged and untagged segments |
| `rdmap`, `terminate` | message headers |
| `stream` | `IwarpStream`, which holds all state; `outbound`, `inbound`, `state` and `work` are its parts |
| `memory` | what a stream asks of registered memory |
| `events` | what a stream reports |
"""
