"""Why a Wyoming connection is closed: the client is told, and can connect again."""


class FaultError(Exception):
    """An `error` event, after which the connection is closed: older clients wait for that.

    Args:
        code: bad-event, bad-audio, too-long, busy, language or internal.
        text: what happened, for people.
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text
