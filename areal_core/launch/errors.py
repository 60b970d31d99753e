"""What can go wrong while starting and watching processes.

RuntimeError
  ServerFailed     an inference server ended, or was not ready in time; the message holds its last log lines
"""


class ServerFailed(RuntimeError):
    """An inference server ended, or was not ready in time; the message holds its last log lines."""
