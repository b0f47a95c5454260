"""Which keys a rank needs, where they come from, and which calls compute its rows.

A call is attention of rows of the shard to rows of a key buffer, with a band that is aligned to the bottom right. The
ends of its keys are chosen such that the band and the positions are those in the whole sequence.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from typing import Any, NamedTuple

from ._split import SequenceSplit

__all__ = ["BandCall", "GlobalBand", "KeyPlan", "RowPiece", "gather_plan", "ring_plans"]


class GlobalBand(NamedTuple):
    """Which keys a query sees by its position in its document."""

    #: The keys before and after the query's own, -1 for all.
    before: int
    after: int
    #: Positions per chunk, 0 for no chunks.
    chunk: int
    #: Whether the scores depend on positions, as with ALiBi.
    scored: bool

    @property
    def is_positional(self) -> bool:
        """Whether a call must know the positions, besides its band."""
        return self.scored or self.chunk > 0


class BandCall(NamedTuple):
    """A call: sequences of query rows and of keys, and one band for all of them."""

    #: The query rows ``[first, last)`` of the shard, and the keys in the buffer.
    rows: tuple[int, int]
    keys: tuple[int, int]
    #: Of each sequence the first query row, the first key (both from the beginning of the call's), and
    #: the number of keys.
    starts_q: tuple[int, ...]
    starts_k: tuple[int, ...]
    used_k: tuple[int, ...]
    before: int
    after: int
    #: Keys after the position of the last query: the alignment gives positions of queries that are larger
    #: by this number.
    shift: int
    #: Whether each row sees its own key here. No other call does.
    own: bool


class RowPiece(NamedTuple):
    """Rows that lie one after the other in a shard and in the key buffer."""

    #: The rank that holds them.
    rank: int
    #: Their first row in its shard and in the buffer, and their number.
    shard: int
    buffer: int
    rows: int


class KeyPlan(NamedTuple):
    """A buffer of keys, and the calls that read it."""

    rows: int
    pieces: tuple[RowPiece, ...]
    calls: tuple[BandCall, ...]


class _Entry(NamedTuple):
    """A sequence of a call. Keys are rows of the whole sequence, then rows of the buffer."""

    document: int
    rows: tuple[int, int]
    keys: tuple[int, int]
    before: int
    after: int
    shift: int
    own: bool = True

    @property
    def full(self) -> tuple[bool, bool]:
        """Whether the band hides no key before a query, and none after one."""
        rows, keys = self.rows[1] - self.rows[0], self.keys[1] - self.keys[0]
        return not 0 <= self.before < keys - 1, not 0 <= self.after < rows - 1


class _Fragment(NamedTuple):
    """Rows of one document in a shard."""

    document: int
    #: The first and the last row of the document, of the fragment, and the fragment's first row in the shard.
    whole: tuple[int, int]
    rows: tuple[int, int]
    at: int


@functools.lru_cache(maxsize=256)
def gather_plan(split: SequenceSplit, rank: int, band: GlobalBand) -> KeyPlan:
    """The plan in which a rank has all keys that its rows see at once, in the order of the sequence."""
    entries = [_entry(fragment, *_seen(fragment, band), band) for fragment in _fragments(split, rank)]
    return _planned(split, entries, range(split.ranks), merges=False)


@functools.lru_cache(maxsize=256)
def ring_plans(split: SequenceSplit, rank: int, band: GlobalBand) -> tuple[KeyPlan, ...]:
    """The plans of each step of a ring: in step ``i`` the keys are those of rank ``rank - i``."""
    plans = []
    for step in range(split.ranks):
        source = (rank - step) % split.ranks
        entries = []
        theirs = _fragments(split, source)
        for fragment in _fragments(split, rank):
            seen = _seen(fragment, band)
            for other in theirs:
                if other.document == fragment.document:
                    pair = _pair(fragment, seen, other.rows, band)
                    entries += [x._replace(own=other == fragment) for x in pair]
        plans.append(_planned(split, entries, (source,), merges=not band.is_positional))
    return tuple(plans)


def _fragments(split: SequenceSplit, rank: int) -> list[_Fragment]:
    """The rows of a rank, cut at the ends of documents. Rows that follow each other are one fragment."""
    found: list[_Fragment] = []
    starts, at = split.documents, 0
    for first, last in split.fragments[rank]:
        while first < last:
            document = bisect_right(starts, first) - 1
            end = min(last, starts[document + 1])
            joined = bool(found) and found[-1].document == document and found[-1].rows[1] == first
            if joined:
                found[-1] = found[-1]._replace(rows=(found[-1].rows[0], end))
            else:
                found.append(_Fragment(document, (starts[document], starts[document + 1]), (first, end), at))
            at += end - first
            first = end
    return found


def _seen(fragment: _Fragment, band: GlobalBand) -> tuple[int, int]:
    """The keys that some row of a fragment sees."""
    start, end = fragment.whole
    first, last = fragment.rows
    low = start if band.before < 0 else max(start, first - band.before)
    high = end if band.after < 0 else min(end, last + band.after)
    if band.chunk:
        low = max(low, start + (first - start) // band.chunk * band.chunk)
        high = min(high, start - (start - last) // band.chunk * band.chunk)
        # Chunks are counted from the first key of a call.
        low = start + (low - start) // band.chunk * band.chunk
    return low, high


def _entry(fragment: _Fragment, low: int, high: int, band: GlobalBand) -> _Entry:
    first, last = fragment.rows
    return _banded(fragment.document, (first, last), fragment.at, (low, high), band)


def _banded(document: int, rows: tuple[int, int], at: int, keys: tuple[int, int], band: GlobalBand) -> _Entry:
    """The sequence of these rows of the whole sequence, which lie in the shard from row ``at`` on, and these keys."""
    (first, last), high = rows, keys[1]
    # The alignment places the last row at the last key: query positions are larger by the keys after that
    # row.
    shift = high - last
    before = band.before + shift if band.before >= 0 else -1
    after = band.after - shift if band.after >= 0 else -1
    return _Entry(document, (at, at + last - first), keys, before, after, shift if band.is_positional else 0)


def _pair(fragment: _Fragment, seen: tuple[int, int], keys: tuple[int, int], band: GlobalBand) -> list[_Entry]:
    """The sequence of a fragment's rows that see some of these keys."""
    low, high = max(seen[0], keys[0]), min(seen[1], keys[1])
    if band.chunk:
        raise AssertionError("a ring has no chunks")
    first, last = fragment.rows
    if band.after >= 0:
        first = max(first, low - band.after)
    if band.before >= 0:
        last = min(last, high + band.before)
    if low >= high or first >= last:
        return []
    if band.after >= 0:
        high = min(high, last + band.after)
    if band.before >= 0:
        low = max(low, first - band.before)
    return [_banded(fragment.document, (first, last), fragment.at + first - fragment.rows[0], (low, high), band)]


def _merged(entries: list[_Entry]) -> list[_Entry]:
    """Fewer sequences: neighbours that are one sequence, with one band."""
    merged: list[_Entry] = []
    for each in entries:
        while merged and (joined := _joined(merged[-1], each)) is not None:
            merged.pop()
            each = joined
        merged.append(each)
    return merged


def _joined(last: _Entry, each: _Entry) -> _Entry | None:
    """One sequence for two of a document, or None. No key before a query is hidden in it."""
    if last.document != each.document or not (last.full[0] and each.full[0]):
        return None
    if last.rows == each.rows:  # further keys
        if not last.full[1] or last.keys[1] != each.keys[0]:
            return None
        return each._replace(keys=(last.keys[0], each.keys[1]), before=-1, own=last.own or each.own)
    if last.rows[1] != each.rows[0] or last.own != each.own:
        return None
    rows = (last.rows[0], each.rows[1])
    if last.keys == each.keys and last.full[1] and each.full[1]:  # further rows
        return each._replace(rows=rows, before=-1, after=-1)
    # Further rows with as many further keys, and no key after a query's own.
    steps = last.keys == (each.keys[0], each.keys[1] - each.rows[1] + each.rows[0])
    return each._replace(rows=rows, before=-1) if steps and last.after == each.after == 0 else None


def _planned(split: SequenceSplit, entries: list[_Entry], ranks: Any, merges: bool) -> KeyPlan:
    """The buffer of the keys of all sequences, in the order of the whole sequence, and the calls."""
    spans = _united(entries)
    placed = _in_buffer(entries, spans)
    calls = _calls(_merged(placed) if merges else placed)
    pieces: list[RowPiece] = []
    for rank in ranks:
        at = 0
        for first, last in split.fragments[rank]:
            buffer = 0
            for low, high in spans:
                begin, end = max(low, first), min(high, last)
                if begin < end:
                    _append(pieces, RowPiece(rank, at + begin - first, buffer + begin - low, end - begin))
                buffer += high - low
            at += last - first
    return KeyPlan(sum(high - low for low, high in spans), tuple(pieces), tuple(calls))


def _append(pieces: list[RowPiece], piece: RowPiece) -> None:
    """Adds rows, to the last piece if they follow it on both sides."""
    if pieces:
        last = pieces[-1]
        if (last.rank, last.shard + last.rows, last.buffer + last.rows) == piece[:3]:
            pieces[-1] = last._replace(rows=last.rows + piece.rows)
            return
    pieces.append(piece)


def _united(entries: list[_Entry]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    for low, high in sorted(entry.keys for entry in entries):
        if low >= high:
            continue
        if spans and low <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], high))
        else:
            spans.append((low, high))
    return spans


def _in_buffer(entries: list[_Entry], spans: list[tuple[int, int]]) -> list[_Entry]:
    """The sequences with keys as rows of the buffer."""
    bases, at = [0], 0
    for low, high in spans:
        at += high - low
        bases.append(at)
    placed = []
    for entry in entries:
        low, high = entry.keys
        number = bisect_right(spans, (low, spans[-1][1])) - 1
        first = bases[number] + low - spans[number][0]
        placed.append(entry._replace(keys=(first, first + high - low)))
    return placed


def _calls(entries: list[_Entry]) -> list[BandCall]:
    """Calls of as many sequences as have one band and lie one after the other."""
    groups: list[list[_Entry]] = []
    for entry in entries:
        if groups and _follows(groups[-1][-1], entry):
            groups[-1].append(entry)
        else:
            groups.append([entry])
    return [_call(group) for group in groups]


def _follows(last: _Entry, entry: _Entry) -> bool:
    """Whether a sequence can stand after another one in a call."""
    ascends = last.document < entry.document and last.keys[1] <= entry.keys[0]
    return ascends and last.rows[1] == entry.rows[0] and last[3:] == entry[3:]


def _call(group: list[_Entry]) -> BandCall:
    rows = group[0].rows[0], group[-1].rows[1]
    keys = group[0].keys[0], group[-1].keys[1]
    return BandCall(
        rows,
        keys,
        tuple(entry.rows[0] - rows[0] for entry in group),
        tuple(entry.keys[0] - keys[0] for entry in group),
        tuple(entry.keys[1] - entry.keys[0] for entry in group),
        *group[0][3:],
    )
