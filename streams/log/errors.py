"""The exceptions that this layer raises, in one hierarchy.

    StreamsError
    |-- AbortedError          nothing of the transaction happened; the same batch may be sent again
    |-- FencedError           another producer owns our transactional id: exit at once, status 75
    |-- OutcomeUnknownError   a commit may or may not have happened: exit; startup resolves it
    |-- DeadlineError         a wait timed out; names who and what was waited for
    |-- OffsetGoneError       an offset that the topic no longer, or not yet, has
    |-- TopicMismatchError    the broker's topic is not as the table says
    |-- BrokerError           the broker refused, or cannot be reached
    |   `-- RefusedError      because of what a record is; nothing of the transaction happened
    `-- ConfigError           a value from the user, with its field

Undecodable records raise `schemas.DecodeError`: a fact about a record, not about the stream.
"""

from __future__ import annotations


class StreamsError(Exception):
    """Base of the tree."""


class AbortedError(StreamsError):
    """The transaction was aborted; nothing of it happened and the producer is usable."""


class FencedError(StreamsError):
    """A newer producer took our transactional id, or a stall made the broker think so."""


class OutcomeUnknownError(StreamsError):
    """A commit's deadline passed without an answer."""


class DeadlineError(StreamsError):
    """A wait ran out. The message names what was waited for, on whom, and for how long."""


class OffsetGoneError(StreamsError):
    """A reader asked for an offset outside the partition's log."""


class TopicMismatchError(StreamsError):
    """A topic is missing, re-created, or has another number of partitions."""


class BrokerError(StreamsError):
    """The broker is down, unreachable, or refused a request."""


class RefusedError(BrokerError):
    """A transaction was aborted because the broker never takes one of its records."""


class ConfigError(StreamsError):
    """A configuration value that cannot be used; the message names field and value."""
