"""The server: the engine as a gRPC service."""
