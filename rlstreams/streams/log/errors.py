"""The exceptions that this layer raises, in one hierarchy.

Undecodable records raise `schemas.DecodeError`: a fact about a record, not about the stream.
"""

from __future__ import annotations


class StreamsError(Exception):
    """Base of the tree."""


class AbortedError(StreamsError):
    """Nothing of the transaction happened, the producer is usable: the same batch may go again."""


class FencedError(StreamsError):
    """A newer producer has our transactional id, or a stall made the broker think so: exit, 75."""


class OutcomeUnknownError(StreamsError):
    """A commit may or may not have happened: exit; the next start settles it."""


class DeadlineError(StreamsError):
    """A wait ran out. The message names the event, the culprit and the time."""


class OffsetGoneError(StreamsError):
    """An offset that the partition no longer, or not yet, has."""


class TopicMismatchError(StreamsError):
    """A topic is missing, re-created, or has another number of partitions."""


class NoGroupsError(StreamsError):
    """A log without consumer groups, as a recording is: nobody knows what a role has committed."""


class BrokerError(StreamsError):
    """The broker is down, unreachable, or refused a request."""


class RefusedError(BrokerError):
    """A transaction was aborted because the broker never takes one of its records."""


class ConfigError(StreamsError):
    """A configuration value that cannot be used; the message names field and value."""
