"""The protocol and the code that grpcio-tools makes of it.

After a change of dflash.proto, from the top of the repository:

    python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. serve/proto/dflash.proto
"""
