"""What lies where in the trajectory store's server, and how its functions are asked and answer.

Keys of a job share a hash tag, so that they stay together on a cluster::

    jigsaw:{job_uid}:records                 set of members "group.sample"
    jigsaw:{job_uid}:hold                    hash: owner, incarnation of the job's trainer
    jigsaw:{job_uid}:group.sample            hash: the record, see below
    jigsaw:{job_uid}:group.sample:tokens     string: libs.common.tokens.TOKEN records, appended; none until the first

The fields of a record; times are milliseconds of the server's clock, counts are decimal numbers::

    spec             msgpack of TrajectorySpec; never changes
    max_failures     the spec's max_attempts. prompt_tokens: length of its prompt_ids; both for the server's rules
    state            pending | running | finished | scored | failed
    epoch            fencing epoch: grows with every claim, transfer, restart and giving back; a worker's writes name it
    owner, expires   of the last lease; a running record whose lease has run out may be claimed
    not_before       a pending record isn't given before this time
    claims           claims given
    failures         attempts that failed in an ordinary way; max_failures of them fail the record
    deaths           times that its worker, or the worker's engine, died under it; from 2 on it has to run alone
    lonely           1 once it runs alone in this claim
    lonely_deaths    deaths alone that came before a single new token; 2 fail the record
    base             tokens at the claim or adoption; 0 after a restart
    resumes          claims that found tokens. moves: transfers
    recomputed       prompt and response tokens whose KV resumes and moves had to compute again
    error            of the last failure or death
    offered          1 while it is transferred and not adopted yet: its death then is nobody's
    claimed_by       name of the call that claimed it. ended_by, ended_answer: the write that ended an epoch last, and what
                     was answered; so a call that is repeated is answered as the first time
    stop_reason, text, turns     of a finished one
    reward, reason               of a scored one; reward as repr(float)
"""

from typing import Any

import msgspec
import numpy as np
from redis.exceptions import ResponseError

from libs.common.errors import JigsawError, StaleEpochError, TokensLost
from libs.common.tokens import TOKEN, from_bytes
from libs.common.trajectory import (
    Alone,
    Append,
    Claim,
    Die,
    Fail,
    Finish,
    NotClaimed,
    Record,
    Release,
    Renew,
    Restart,
    Score,
    TrajectoryId,
    TrajectorySpec,
    Transfer,
    Write,
)

_TEXTS = ("text", "stop_reason", "reason", "error", "owner")
_NUMBERS = ("epoch", "turns", "claims", "failures", "deaths", "resumes", "moves", "recomputed")
RECORD_FIELDS = ("spec", "state", "reward", *_TEXTS, *_NUMBERS)
_spec_encoder = msgspec.msgpack.Encoder()
_spec_decoder = msgspec.msgpack.Decoder(TrajectorySpec)


def hold_key(job_uid: str) -> str:
    """Which trainer holds a job."""
    return f"jigsaw:{{{job_uid}}}:hold"


def index_key(job_uid: str) -> str:
    """The members of a job."""
    return f"jigsaw:{{{job_uid}}}:records"


def record_keys(id: TrajectoryId) -> tuple[str, str]:
    """A record, and its tokens."""
    record = f"jigsaw:{{{id.job_uid}}}:{id.member}"
    return record, f"{record}:tokens"


def encoded_spec(spec: TrajectorySpec) -> bytes:
    """The ``spec`` field of a record."""
    return _spec_encoder.encode(spec)


def queue_write(pipe: Any, write: Write) -> None:
    """Add a write's call to a pipeline."""
    record, tokens = record_keys(write.id)
    match write:
        case Append(epoch=epoch, expected_length=length, tokens=new):
            pipe.fcall("jigsaw_append", 2, record, tokens, epoch, length, new.tobytes())
        case Finish(epoch=epoch, expected_length=length, tokens=new):
            end = (write.stop_reason, write.text, write.turns)
            pipe.fcall("jigsaw_finish", 2, record, tokens, epoch, length, new.tobytes(), *end)
        case Renew(epoch=epoch, ttl_ms=ttl_ms):
            pipe.fcall("jigsaw_renew", 1, record, epoch, ttl_ms)
        case Release(epoch=epoch):
            pipe.fcall("jigsaw_release", 1, record, epoch)
        case Transfer(epoch=epoch, to=to, ttl_ms=ttl_ms):
            pipe.fcall("jigsaw_transfer", 1, record, epoch, to, ttl_ms)
        case Restart(epoch=epoch):
            pipe.fcall("jigsaw_restart", 2, record, tokens, epoch)
        case Alone(epoch=epoch):
            pipe.fcall("jigsaw_alone", 1, record, epoch)
        case Fail(epoch=epoch, error=error, backoff_ms=backoff_ms):
            pipe.fcall("jigsaw_fail", 1, record, epoch, error, -1 if backoff_ms is None else backoff_ms)
        case Die(epoch=epoch, error=error):
            pipe.fcall("jigsaw_die", 2, record, tokens, epoch, error)
        case Score(epoch=epoch, reward=reward, reason=reason):
            valid = reward is not None
            pipe.fcall("jigsaw_score", 1, record, epoch, repr(reward) if valid else "", reason, "1" if valid else "0")


def answer_of(reply: Any) -> "int | str | StaleEpochError":
    """What a write was answered, or the error with which it was refused.

    Raises:
        JigsawError: it was refused for a reason that there mustn't be.
    """
    match reply:
        case ResponseError() if str(reply).startswith("STALE"):
            return StaleEpochError(str(reply))
        case ResponseError() if str(reply).startswith("LENGTH"):
            return TokensLost(str(reply))
        case Exception():
            raise JigsawError(f"the trajectory store refused a write: {reply}") from reply
        case bytes():
            return reply.decode()
        case _:
            return int(reply)


def claim_of(reply: list[Any]) -> Claim | NotClaimed:
    """What a claim or an adoption was answered."""
    why = reply[0].decode()
    if why != "claimed":
        return NotClaimed(why, int(reply[1]) if why == "later" else 0)
    _, epoch, failures, deaths, alone, spec, tokens = reply
    return Claim(
        _spec_decoder.decode(spec), int(epoch), int(failures), int(deaths), alone=bool(alone), tokens=from_bytes(tokens)
    )


def record_of(values: list[Any], tokens: bytes | None) -> Record | None:
    """A record from the values of ``RECORD_FIELDS``; None if there is none."""
    fields = dict(zip(RECORD_FIELDS, values, strict=True))
    if fields["spec"] is None:
        return None
    more: dict[str, Any] = {name: (fields[name] or b"").decode() for name in _TEXTS}
    more |= {name: int(fields[name] or 0) for name in _NUMBERS}
    return Record(
        spec=_spec_decoder.decode(fields["spec"]),
        state=fields["state"].decode(),
        tokens=from_bytes(tokens) if tokens else np.zeros(0, TOKEN),
        reward=float(fields["reward"]) if fields["reward"] else None,
        **more,
    )
