"""Calls between sites over gRPC: messages, certificates, and checks of what strangers send."""
