"""Errors of starting and monitoring processes.

RuntimeError
  ServerFailed     an inference server ended, or was not ready in time; the message has its last log lines
"""


class ServerFailed(RuntimeError):
    """An inference server ended, or was not ready in time; the message has its last log lines."""
