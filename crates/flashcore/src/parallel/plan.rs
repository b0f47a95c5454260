//! Which keys a rank needs, where they come from, and which calls compute its rows.
//!
//! A call is attention of rows of the shard to rows of a key buffer, with a band that is aligned to the
//! bottom right. The ends of its keys are chosen such that the band is that of the whole sequence.

use std::ops::Range;

use super::SequenceSplit;

/// Which keys a query sees by its position in its document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GlobalBand {
    pub before: Option<usize>,
    pub after: Option<usize>,
    /// Whether programs read positions: then each call is one sequence, whose positions are one after the
    /// other.
    pub positional: bool,
}

/// Rows of one document that see keys of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SequenceCall {
    pub document: usize,
    /// Rows of the shard.
    pub rows: Range<usize>,
    /// Rows of the whole sequence, later of the buffer.
    pub keys: Range<usize>,
    pub before: Option<usize>,
    pub after: Option<usize>,
    /// Whether each row sees its own key here. No other call does.
    pub own: bool,
    /// The positions of the first row and of the first key in the document.
    pub positions: [usize; 2],
}

impl SequenceCall {
    /// Whether the band hides no key before a query, and none after one.
    fn is_full(&self) -> [bool; 2] {
        [
            self.before.is_none_or(|keys| keys + 1 >= self.keys.len()),
            self.after.is_none_or(|keys| keys + 1 >= self.rows.len()),
        ]
    }
}

/// A call: sequences that lie one after the other and have one band.
#[derive(Clone, Debug)]
pub(super) struct BandCall {
    pub sequences: Vec<SequenceCall>,
}

impl BandCall {
    /// The query rows of the shard.
    pub fn rows(&self) -> Range<usize> {
        self.first().rows.start..self.last().rows.end
    }

    /// The keys in the buffer.
    pub fn keys(&self) -> Range<usize> {
        self.first().keys.start..self.last().keys.end
    }

    pub fn first(&self) -> &SequenceCall {
        &self.sequences[0]
    }

    fn last(&self) -> &SequenceCall {
        &self.sequences[self.sequences.len() - 1]
    }

    /// Pairs of a query and a key that it sees.
    pub fn pairs(&self) -> usize {
        let of = |x: &SequenceCall| {
            let (rows, keys) = (x.rows.len() as i64, x.keys.len() as i64);
            // Row `i` is level with key `i + keys − rows`. The sum of the keys before `i + start` of each
            // row:
            let below = |start: i64| {
                let first = (-start).clamp(0, rows); // the first row with such a key
                let full = (keys - start).clamp(first, rows.max(first)); // the first row with all of them
                (full - first) * (2 * start + first + full - 1) / 2 + (rows - full) * keys
            };
            let last = x.after.map_or(rows * keys, |after| below(keys - rows + after as i64 + 1));
            last - x.before.map_or(0, |before| below(keys - rows - before as i64))
        };
        self.sequences.iter().map(of).sum::<i64>() as usize
    }
}

/// Rows that lie one after the other in a shard and in the key buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RowPiece {
    /// The rank that holds them.
    pub rank: usize,
    pub shard: Range<usize>,
    /// Their first row in the buffer.
    pub buffer: usize,
}

impl RowPiece {
    pub fn in_buffer(&self) -> Range<usize> {
        self.buffer..self.buffer + self.shard.len()
    }
}

/// A buffer of keys, and the calls that read it.
#[derive(Clone, Debug)]
pub(super) struct KeyPlan {
    pub rows: usize,
    pub pieces: Vec<RowPiece>,
    pub calls: Vec<BandCall>,
}

/// The plan in which a rank has all keys that its rows see at once, in the order of the sequence.
pub(super) fn gather_plan(split: &SequenceSplit, rank: usize, band: GlobalBand) -> KeyPlan {
    let of = |fragment: &Fragment| fragment.call(fragment.rows.clone(), fragment.seen(band), band);
    let calls = fragments(split, rank).iter().map(of).collect();
    planned(split, calls, 0..split.ranks(), band)
}

/// The plan of a step of a ring, in which the keys are those of rank `rank − step`.
pub(super) fn ring_plan(split: &SequenceSplit, rank: usize, step: usize, band: GlobalBand) -> KeyPlan {
    let source = (rank + split.ranks() - step) % split.ranks();
    let theirs = fragments(split, source);
    let mut calls = Vec::new();
    for fragment in fragments(split, rank) {
        for other in theirs.iter().filter(|other| other.document == fragment.document) {
            calls.extend(fragment.call_on(&other.rows, band));
        }
    }
    if !band.positional {
        calls = merged(calls);
    }
    planned(split, calls, source..source + 1, band)
}

/// Rows of one document in a shard.
struct Fragment {
    document: usize,
    /// The rows of the document, of the fragment, and the fragment's first row in the shard.
    whole: Range<usize>,
    rows: Range<usize>,
    at: usize,
}

/// The rows of a rank, cut at the ends of documents. Rows that follow each other are one fragment.
fn fragments(split: &SequenceSplit, rank: usize) -> Vec<Fragment> {
    let mut found: Vec<Fragment> = Vec::new();
    for (here, there) in split.places(rank) {
        let mut first = there.start;
        while first < there.end {
            let document = split.document(first);
            let whole = split.documents[document]..split.documents[document + 1];
            let end = there.end.min(whole.end);
            match found.last_mut().filter(|last| last.document == document && last.rows.end == first) {
                Some(last) => last.rows.end = end,
                None => {
                    let at = here.start + first - there.start;
                    found.push(Fragment { document, whole, rows: first..end, at });
                }
            }
            first = end;
        }
    }
    found
}

impl Fragment {
    /// The keys that some row sees.
    fn seen(&self, band: GlobalBand) -> Range<usize> {
        let low = band.before.map_or(0, |before| self.rows.start.saturating_sub(before));
        let high = band.after.map_or(usize::MAX, |after| self.rows.end.saturating_add(after));
        low.max(self.whole.start)..high.min(self.whole.end)
    }

    /// The sequence of some rows, of the whole sequence, and some keys.
    fn call(&self, rows: Range<usize>, keys: Range<usize>, band: GlobalBand) -> SequenceCall {
        // The alignment places the last row at the last key: the positions of queries are larger by the keys
        // after that row.
        let shift = keys.end as i64 - rows.end as i64;
        let moved = |keys: Option<usize>, by: i64| keys.map(|keys| (keys as i64 + by) as usize);
        let at = self.at + rows.start - self.rows.start;
        SequenceCall {
            document: self.document,
            before: moved(band.before, shift),
            after: moved(band.after, -shift),
            own: keys.contains(&rows.start) && keys.end >= rows.end,
            positions: [rows.start, keys.start].map(|row| row - self.whole.start),
            rows: at..at + rows.len(),
            keys,
        }
    }

    /// The sequence of the rows that see some of `keys`, if there are any.
    fn call_on(&self, keys: &Range<usize>, band: GlobalBand) -> Option<SequenceCall> {
        let seen = self.seen(band);
        let (mut low, mut high) = (seen.start.max(keys.start), seen.end.min(keys.end));
        let Range { start: mut first, end: mut last } = self.rows;
        if let Some(after) = band.after {
            first = first.max(low.saturating_sub(after));
        }
        if let Some(before) = band.before {
            last = last.min(high.saturating_add(before));
        }
        if low >= high || first >= last {
            return None;
        }
        if let Some(after) = band.after {
            high = high.min(last.saturating_add(after));
        }
        if let Some(before) = band.before {
            low = low.max(first.saturating_sub(before));
        }
        let call = self.call(first..last, low..high, band);
        Some(SequenceCall { own: *keys == self.rows, ..call })
    }
}

/// Fewer sequences: neighbours that are one sequence, with one band.
fn merged(calls: Vec<SequenceCall>) -> Vec<SequenceCall> {
    let mut merged: Vec<SequenceCall> = Vec::new();
    for mut each in calls {
        while let Some(joined) = merged.last().and_then(|last| joined(last, &each)) {
            merged.pop();
            each = joined;
        }
        merged.push(each);
    }
    merged
}

/// One sequence for two of a document. No key before a query is hidden in it.
fn joined(last: &SequenceCall, each: &SequenceCall) -> Option<SequenceCall> {
    let ([before, after], [each_before, each_after]) = (last.is_full(), each.is_full());
    if last.document != each.document || !(before && each_before) {
        return None;
    }
    let with = |rows: Range<usize>, keys: Range<usize>, after| SequenceCall {
        rows,
        keys,
        after,
        before: None,
        own: last.own || each.own,
        ..last.clone()
    };
    if last.rows == each.rows {
        let follows = after && last.keys.end == each.keys.start;
        return follows.then(|| with(each.rows.clone(), last.keys.start..each.keys.end, each.after));
    }
    if last.rows.end != each.rows.start || last.own != each.own {
        return None;
    }
    let rows = last.rows.start..each.rows.end;
    if last.keys == each.keys && after && each_after {
        return Some(with(rows, each.keys.clone(), None));
    }
    // Further rows with as many further keys, and no key after a query's own.
    let steps = last.keys.start == each.keys.start && last.keys.end + each.rows.len() == each.keys.end;
    (steps && last.after == Some(0) && each.after == Some(0)).then(|| with(rows, each.keys.clone(), Some(0)))
}

/// The buffer of the keys of all sequences, in the order of the whole sequence, and the calls.
fn planned(
    split: &SequenceSplit,
    calls: Vec<SequenceCall>,
    ranks: Range<usize>,
    band: GlobalBand,
) -> KeyPlan {
    let spans = united(&calls);
    let mut pieces: Vec<RowPiece> = Vec::new();
    for rank in ranks {
        for (here, there) in split.places(rank) {
            let mut buffer = 0;
            for span in &spans {
                let common = span.start.max(there.start)..span.end.min(there.end);
                if !common.is_empty() {
                    let first = here.start + common.start - there.start;
                    let shard = first..first + common.len();
                    append(&mut pieces, RowPiece { rank, shard, buffer: buffer + common.start - span.start });
                }
                buffer += span.len();
            }
        }
    }
    let rows = spans.iter().map(Range::len).sum();
    let calls = calls.into_iter().map(|call| in_buffer(call, &spans));
    KeyPlan { rows, pieces, calls: grouped(calls, band) }
}

/// Adds rows, to the last piece if they follow it on both sides.
fn append(pieces: &mut Vec<RowPiece>, piece: RowPiece) {
    match pieces.last_mut() {
        Some(last)
            if (last.rank, last.shard.end, last.in_buffer().end)
                == (piece.rank, piece.shard.start, piece.buffer) =>
        {
            last.shard.end = piece.shard.end;
        }
        _ => pieces.push(piece),
    }
}

/// The keys of all sequences, as ascending ranges with gaps between them.
fn united(calls: &[SequenceCall]) -> Vec<Range<usize>> {
    let mut keys: Vec<_> =
        calls.iter().map(|call| call.keys.clone()).filter(|keys| !keys.is_empty()).collect();
    keys.sort_unstable_by_key(|keys| (keys.start, keys.end));
    let mut spans: Vec<Range<usize>> = Vec::new();
    for keys in keys {
        match spans.last_mut().filter(|last| keys.start <= last.end) {
            Some(last) => last.end = last.end.max(keys.end),
            None => spans.push(keys),
        }
    }
    spans
}

/// The sequence with keys as rows of the buffer.
fn in_buffer(call: SequenceCall, spans: &[Range<usize>]) -> SequenceCall {
    let number = spans.partition_point(|span| span.end <= call.keys.start);
    let base: usize = spans[..number].iter().map(Range::len).sum();
    let first = spans.get(number).map_or(base, |span| base + call.keys.start - span.start);
    SequenceCall { keys: first..first + call.keys.len(), ..call }
}

/// Calls of as many sequences as have one band and lie one after the other.
fn grouped(sequences: impl Iterator<Item = SequenceCall>, band: GlobalBand) -> Vec<BandCall> {
    let mut calls: Vec<BandCall> = Vec::new();
    for each in sequences {
        let follows = |last: &SequenceCall| {
            let ascends = last.document < each.document && last.keys.end <= each.keys.start;
            let alike = (last.before, last.after, last.own) == (each.before, each.after, each.own);
            !band.positional && ascends && last.rows.end == each.rows.start && alike
        };
        match calls.last_mut().filter(|call| follows(call.last())) {
            Some(call) => call.sequences.push(each),
            None => calls.push(BandCall { sequences: vec![each] }),
        }
    }
    calls
}

#[cfg(test)]
mod tests {
    use super::*;

    const LENGTH: usize = 41;

    fn splits() -> Vec<SequenceSplit> {
        let documents: [&[usize]; 3] = [&[0, LENGTH], &[0, 1, 2, 9, 30, 31, LENGTH], &[0, 20, LENGTH]];
        let of = [SequenceSplit::zigzag, SequenceSplit::contiguous, SequenceSplit::by_documents];
        let each = documents.into_iter().flat_map(|documents| of.map(|of| (documents, of)));
        each.flat_map(|(documents, of)| [1, 2, 3, 4, 5].map(|ranks| of(documents, ranks).unwrap())).collect()
    }

    fn bands() -> Vec<GlobalBand> {
        let bounds = [(None, None), (None, Some(0)), (Some(7), Some(0)), (Some(3), Some(4)), (None, Some(5))];
        let bounds = bounds.into_iter().chain([(Some(9), None), (Some(0), Some(0))]);
        bounds
            .flat_map(|(before, after)| {
                [false, true].map(|positional| GlobalBand { before, after, positional })
            })
            .collect()
    }

    /// Adds 1 for each pair that a plan computes, and for each row that sees its own key.
    fn count(split: &SequenceSplit, rank: usize, plan: &KeyPlan, counts: &mut [Vec<u32>], own: &mut [u32]) {
        let held: Vec<usize> = split.fragments[rank].iter().cloned().flatten().collect();
        let mut buffer = vec![usize::MAX; plan.rows];
        for piece in &plan.pieces {
            let theirs: Vec<usize> = split.fragments[piece.rank].iter().cloned().flatten().collect();
            for (to, from) in piece.in_buffer().zip(piece.shard.clone()) {
                assert_eq!(buffer[to], usize::MAX, "a key is received twice");
                buffer[to] = theirs[from];
            }
        }
        assert!(!buffer.contains(&usize::MAX), "a key is missing");
        for call in &plan.calls {
            let mut pairs = 0;
            for x in &call.sequences {
                for (i, row) in x.rows.clone().enumerate() {
                    let level = i as i64 + x.keys.len() as i64 - x.rows.len() as i64;
                    for (j, key) in x.keys.clone().enumerate() {
                        let j = j as i64;
                        let seen = x.before.is_none_or(|before| j >= level - before as i64)
                            && x.after.is_none_or(|after| j <= level + after as i64);
                        counts[held[row]][buffer[key]] += u32::from(seen);
                        pairs += usize::from(seen);
                    }
                    own[held[row]] += u32::from(x.own);
                    assert!(!x.own || buffer[x.keys.clone()].contains(&held[row]));
                    let first = split.documents[x.document];
                    assert!(call.sequences.len() > 1 || buffer[x.keys.start] == first + x.positions[1]);
                }
            }
            assert_eq!(call.pairs(), pairs);
        }
    }

    #[test]
    fn calls_compute_each_visible_pair_once() {
        for (split, band) in
            splits().iter().flat_map(|split| bands().into_iter().map(move |band| (split, band)))
        {
            for ring in [false, true] {
                let (mut counts, mut own) = (vec![vec![0; LENGTH]; LENGTH], vec![0; LENGTH]);
                for rank in 0..split.ranks() {
                    for step in 0..if ring { split.ranks() } else { 1 } {
                        let plan = match ring {
                            true => ring_plan(split, rank, step, band),
                            false => gather_plan(split, rank, band),
                        };
                        count(split, rank, &plan, &mut counts, &mut own);
                    }
                }
                for (row, counts) in counts.iter().enumerate() {
                    for (key, &count) in counts.iter().enumerate() {
                        let seen = split.document(row) == split.document(key)
                            && band.before.is_none_or(|before| key + before >= row)
                            && band.after.is_none_or(|after| key <= row + after);
                        assert_eq!(count, u32::from(seen), "{split:?} {band:?}: row {row}, key {key}");
                    }
                }
                assert_eq!(own, [1; LENGTH], "a row sees its own key in one call");
            }
        }
    }

    #[test]
    fn work_is_balanced_and_windows_fetch_their_halo_alone() {
        let causal = GlobalBand { before: None, after: Some(0), positional: false };
        for ranks in [2, 4, 8] {
            let split = SequenceSplit::zigzag(&[0, 16 * ranks * ranks], ranks).unwrap();
            let work =
                |rank| gather_plan(&split, rank, causal).calls.iter().map(BandCall::pairs).sum::<usize>();
            assert!((1..ranks).all(|rank| work(rank) == work(0)));
            let step = |rank| ring_plan(&split, rank, 1, causal);
            assert!((0..ranks).all(|rank| (step(rank).calls.len(), step(rank).pieces.len()) == (1, 1)));
        }
        let split = SequenceSplit::contiguous(&[0, 64], 4).unwrap();
        let window = GlobalBand { before: Some(7), ..causal };
        for rank in 0..4 {
            let pieces = gather_plan(&split, rank, window).pieces;
            let away: Vec<_> = pieces.iter().filter(|piece| piece.rank != rank).collect();
            assert!(
                away.len() == rank.min(1) && away.iter().all(|x| (x.rank + 1, x.shard.len()) == (rank, 7))
            );
        }
    }
}
