"""The server: the engine as a service over gRPC and HTTP."""
