//! A ring over shards in device memory.

use std::ops::Range;
use std::sync::Arc;

use driver::{Buffer, Communicator, DeviceSlice, Event, Stream, bytes_of};
use problem::{
    Band, Corner, Layout, LengthArray, Lengths, Operand, Pass, Problem, Score, SideLengths, Storage,
};

use super::SequenceSplit;
use super::plan::{BandCall, GlobalBand, KeyPlan, RowPiece, ring_plan};
use crate::AttentionError;
use crate::error::refused;
use crate::gpu::{Gpu, Prepared};

/// The shards of a rank, each `[row, head, dim]` in the order of its elements; the LSE is `[head, row]`, f32.
#[derive(Clone, Copy, Debug)]
pub struct DeviceShards<'a> {
    /// Queries.
    pub q: DeviceSlice<'a>,
    /// Keys.
    pub k: DeviceSlice<'a>,
    /// Values.
    pub v: DeviceSlice<'a>,
    /// The result of this rank's rows.
    pub out: DeviceSlice<'a>,
    /// The LSE of this rank's rows.
    pub lse: DeviceSlice<'a>,
}

/// The forward pass of a sequence, or of packed documents, whose rows are sharded over GPUs: one for each
/// rank of a [`Communicator`]. Keys go around the ring of ranks, one rank's at a time, while those that came
/// before are computed. Each step continues from the result of the step before in its kernel, in the memory
/// of O: with more than two ranks, O is rounded to its type in each step.
///
/// A value is prepared once, with its kernels and memory, and used for any number of calls, one at a time.
#[derive(Debug)]
pub struct DeviceRing {
    rank: usize,
    ranks: usize,
    stages: Vec<RingStage>,
    /// Keys and values that arrive: those of one stage are read while those of the next one come.
    arriving: [Buffer; 2],
    lse_before: Buffer,
    transfer: Stream,
    /// Recorded when the stream of the caller, and that of the transfers, have come to a stage.
    computed: Event,
    arrived: Event,
    sizes: ShardSizes,
    /// Whether each row has a call that does not continue, so that no row is read before it is written.
    is_complete: bool,
}

/// Bytes of the tensors of a shard.
#[derive(Clone, Copy, Debug)]
struct ShardSizes {
    q: usize,
    /// Of a row of keys and of values.
    row: [usize; 2],
    rows: usize,
    out: usize,
    lse: usize,
}

/// The keys of one rank.
#[derive(Debug)]
struct RingStage {
    rows: usize,
    /// The rows of this rank's keys that a rank needs.
    sends: Vec<(usize, Range<usize>)>,
    pieces: Vec<RowPiece>,
    /// Whether the keys are this rank's own, as they lie in its shard.
    is_own: bool,
    calls: Vec<RingCall>,
}

#[derive(Debug)]
struct RingCall {
    prepared: Arc<Prepared>,
    lengths: Vec<(Operand, Buffer)>,
    continues: bool,
}

impl DeviceRing {
    /// Prepares the calls of rank `rank`. `whole` is the problem on one GPU: its heads, types, band, scale
    /// and softcap are used. It has one batch entry of as many rows and keys as the split.
    ///
    /// # Errors
    /// When the problem is not such a one, when no kernel computes its parts, or when the device fails.
    pub fn new(
        gpu: &Gpu,
        whole: &Problem,
        split: &SequenceSplit,
        rank: usize,
    ) -> Result<DeviceRing, AttentionError> {
        check(whole, split, rank)?;
        let (ranks, rows) = (split.ranks(), split.rows());
        let band = band_of(whole);
        let (mut seen, mut is_complete) = (vec![false; rows], true);
        let mut stages = Vec::with_capacity(ranks);
        for step in 0..ranks {
            let to = (rank + step) % ranks;
            let sends = if step == 0 { Vec::new() } else { ring_plan(split, to, step, band).pieces };
            let KeyPlan { rows: keys, pieces, calls } = ring_plan(split, rank, step, band);
            let is_own = step == 0 && pieces.iter().all(|piece| piece.shard.start == piece.buffer);
            // Own keys are read in the shard, which may have rows after those that a row sees.
            let keys = if is_own { rows } else { keys };
            let calls = calls.iter().map(|call| {
                let of_call = &mut seen[call.rows()];
                let continues = of_call.contains(&true);
                is_complete &= !(continues && of_call.contains(&false));
                of_call.fill(true);
                RingCall::new(gpu, whole, (rows, keys), call, continues)
            });
            let calls = calls.collect::<Result<_, _>>()?;
            let sends = sends.into_iter().map(|piece| (to, piece.shard)).collect();
            stages.push(RingStage { rows: keys, sends, pieces, is_own, calls });
        }
        let [in_bytes, out_bytes] = [whole.dtypes.k, whole.dtypes.out].map(|dtype| dtype.bytes());
        let sizes = ShardSizes {
            q: rows * whole.heads_q * whole.head_dim * in_bytes,
            row: [whole.head_dim, whole.head_dim_v].map(|dim| whole.heads_kv * dim * in_bytes),
            rows,
            out: rows * whole.heads_q * whole.head_dim_v * out_bytes,
            lse: rows * whole.heads_q * size_of::<f32>(),
        };
        let most = stages.iter().filter(|stage| !stage.is_own).map(|stage| stage.rows).max().unwrap_or(0);
        let (context, room) = (gpu.context(), (most * sizes.row.iter().sum::<usize>()).max(1));
        Ok(DeviceRing {
            rank,
            ranks,
            stages,
            arriving: [Buffer::new(context, room)?, Buffer::new(context, room)?],
            lse_before: Buffer::new(context, sizes.lse)?,
            transfer: Stream::new(context)?,
            computed: Event::without_time(context)?,
            arrived: Event::without_time(context)?,
            sizes,
            is_complete: is_complete && seen.iter().all(|seen| *seen),
        })
    }

    /// Enqueues the call on `stream`. All ranks make it together. Rows of padding have O = 0 and an LSE of
    /// −∞.
    ///
    /// # Errors
    /// When the group is another one, a slice is too short, or the device or the group fails.
    pub fn run(
        &self,
        group: &Communicator,
        stream: &Stream,
        shards: DeviceShards<'_>,
    ) -> Result<(), AttentionError> {
        self.check_shards(group, &shards)?;
        let DeviceShards { q, out, lse, .. } = shards;
        if !self.is_complete {
            stream.fill(out, 0)?;
            stream.fill_u32(lse, f32::NEG_INFINITY.to_bits())?;
        }
        for (number, stage) in self.stages.iter().enumerate() {
            if number > 0 {
                stream.wait(&self.arrived)?;
            }
            if let Some(next) = self.stages.get(number + 1) {
                self.exchange(group, stream, next, (&shards, &self.arriving[(number + 1) % 2]))?;
            }
            let [k, v] = match stage.is_own {
                true => [shards.k, shards.v],
                false => self.parts(stage, &self.arriving[number % 2])?,
            };
            if number == 0 && !stage.is_own {
                for (to, from, row) in [(k, shards.k, self.sizes.row[0]), (v, shards.v, self.sizes.row[1])] {
                    for piece in &stage.pieces {
                        stream.copy(
                            rows_of(to, piece.in_buffer(), row)?,
                            rows_of(from, piece.shard.clone(), row)?,
                        )?;
                    }
                }
            }
            for call in &stage.calls {
                call.enqueue(stream, [q, k, v], (out, lse), &self.lse_before)?;
            }
        }
        Ok(())
    }

    /// Sends the keys that another rank needs in a stage, and receives those of the stage, beside the work of
    /// `stream`.
    fn exchange(
        &self,
        group: &Communicator,
        stream: &Stream,
        stage: &RingStage,
        (shards, arriving): (&DeviceShards<'_>, &Buffer),
    ) -> Result<(), AttentionError> {
        self.computed.record(stream)?;
        self.transfer.wait(&self.computed)?;
        let to = self.parts(stage, arriving)?;
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for (i, from) in [shards.k, shards.v].into_iter().enumerate() {
            for (peer, rows) in &stage.sends {
                sends.push((*peer, rows_of(from, rows.clone(), self.sizes.row[i])?));
            }
            for piece in &stage.pieces {
                receives.push((piece.rank, rows_of(to[i], piece.in_buffer(), self.sizes.row[i])?));
            }
        }
        if !sends.is_empty() || !receives.is_empty() {
            group.exchange(&self.transfer, &sends, &receives)?;
        }
        Ok(self.arrived.record(&self.transfer)?)
    }

    /// The keys and the values of a stage in a buffer.
    fn parts<'a>(
        &self,
        stage: &RingStage,
        buffer: &'a Buffer,
    ) -> Result<[DeviceSlice<'a>; 2], AttentionError> {
        let [k, v] = self.sizes.row.map(|row| stage.rows * row);
        let part = |offset, bytes| part(buffer.slice(), offset, bytes);
        Ok([part(0, k)?, part(k, v)?])
    }

    fn check_shards(&self, group: &Communicator, shards: &DeviceShards<'_>) -> Result<(), AttentionError> {
        let of_group = [group.rank(), group.ranks()];
        if of_group != [self.rank, self.ranks] {
            let expected = format!("rank {} of {}", self.rank, self.ranks);
            let value = format!("rank {} of {}", of_group[0], of_group[1]);
            return Err(refused("group", "rank", value, expected));
        }
        let ShardSizes { q, row, rows, out, lse } = self.sizes;
        for (argument, slice, expected) in [
            ("q", shards.q, q),
            ("k", shards.k, rows * row[0]),
            ("v", shards.v, rows * row[1]),
            ("out", shards.out, out),
            ("lse", shards.lse, lse),
        ] {
            if slice.bytes() != expected {
                return Err(refused(argument, "number of bytes", slice.bytes(), expected.to_string()));
            }
        }
        Ok(())
    }
}

impl RingCall {
    /// Prepares a call of rows of a shard to rows of a buffer of keys.
    fn new(
        gpu: &Gpu,
        whole: &Problem,
        (rows, keys): (usize, usize),
        call: &BandCall,
        continues: bool,
    ) -> Result<RingCall, AttentionError> {
        let longest = |of: fn(&super::plan::SequenceCall) -> usize| call.sequences.iter().map(of).max();
        let ends = |from: fn(&super::plan::SequenceCall) -> usize, end: usize| {
            let ends = call.sequences.iter().map(from).chain([end]);
            ends.map(|end| end as i32).collect::<Vec<i32>>()
        };
        let starts_kv = ends(|x| x.keys.start, call.keys().end);
        let used: Vec<i32> = call.sequences.iter().map(|x| x.keys.len() as i32).collect();
        let gaps = starts_kv.windows(2).zip(&used).any(|(ends, &used)| ends[1] - ends[0] != used);
        let packed = |rows, used| SideLengths { packed: Some(rows), used };
        let bound = |keys: Option<usize>| keys.and_then(|keys| u32::try_from(keys).ok());
        let first = call.first();
        let strides = |heads: usize, dim: usize| Layout::Bshd.strides(heads, 1, dim);
        let problem = Problem {
            pass: Pass::Forward { lse: true, continues, invariant: None },
            heads_kv: whole.heads_kv,
            seq_kv: longest(|x| x.keys.len()).unwrap_or(0),
            head_dim_v: whole.head_dim_v,
            band: Band {
                corner: Corner::BottomRight,
                before: bound(first.before),
                after: bound(first.after),
            },
            score: whole.score,
            lengths: Lengths { q: packed(rows, false), kv: packed(keys, gaps), left_padded: false },
            q: strides(whole.heads_q, whole.head_dim),
            k: strides(whole.heads_kv, whole.head_dim),
            v: strides(whole.heads_kv, whole.head_dim_v),
            out: strides(whole.heads_q, whole.head_dim_v),
            ..Problem::new(
                call.sequences.len(),
                whole.heads_q,
                longest(|x| x.rows.len()).unwrap_or(0),
                whole.head_dim,
                whole.dtypes,
            )
        };
        let arrays = [
            (LengthArray::CumulativeQ, Some(ends(|x| x.rows.start, call.rows().end))),
            (LengthArray::CumulativeKv, Some(starts_kv)),
            (LengthArray::UsedKv, gaps.then_some(used)),
        ];
        let mut lengths = Vec::new();
        for (array, values) in arrays {
            let Some(values) = values else { continue };
            let mut buffer = Buffer::new(gpu.context(), size_of_val(&values[..]))?;
            buffer.upload(bytes_of(&values[..]))?;
            lengths.push((Operand::Lengths(array), buffer));
        }
        Ok(RingCall { prepared: gpu.prepare(&problem, None)?, lengths, continues })
    }

    fn enqueue(
        &self,
        stream: &Stream,
        [q, k, v]: [DeviceSlice<'_>; 3],
        (out, lse): (DeviceSlice<'_>, DeviceSlice<'_>),
        lse_before: &Buffer,
    ) -> Result<(), AttentionError> {
        let mut operands =
            vec![(Operand::Q, q), (Operand::K, k), (Operand::V, v), (Operand::OUT, out), (Operand::Lse, lse)];
        operands.extend(self.lengths.iter().map(|(operand, buffer)| (*operand, buffer.slice())));
        if self.continues {
            stream.copy(lse_before.slice(), lse)?;
            operands.extend([(Operand::OutBefore, out), (Operand::LseBefore, lse_before.slice())]);
        }
        self.prepared.enqueue_operands(stream, &operands)
    }
}

fn part(slice: DeviceSlice<'_>, offset: usize, bytes: usize) -> Result<DeviceSlice<'_>, AttentionError> {
    let short = || driver::DriverError::Copy { bytes: offset + bytes, room: slice.bytes() };
    Ok(slice.part(offset, bytes).ok_or_else(short)?)
}

fn rows_of(
    slice: DeviceSlice<'_>,
    rows: Range<usize>,
    row: usize,
) -> Result<DeviceSlice<'_>, AttentionError> {
    part(slice, rows.start * row, rows.len() * row)
}

/// The band of positions. Both corners are one where there are as many keys as rows.
fn band_of(whole: &Problem) -> GlobalBand {
    let bound = |keys: Option<u32>| keys.map(|keys| keys as usize);
    GlobalBand { before: bound(whole.band.before), after: bound(whole.band.after), positional: false }
}

/// Refuses problems that a ring in device memory does not compute.
fn check(whole: &Problem, split: &SequenceSplit, rank: usize) -> Result<(), AttentionError> {
    whole.check()?;
    if rank >= split.ranks() {
        return Err(refused("rank", "number", rank, format!("a number below {}", split.ranks())));
    }
    let extents = [whole.batch, whole.seq_q, whole.seq_kv];
    if extents != [1, split.length(), split.length()] {
        let value = format!("{extents:?}");
        let expected = format!("[1, {0}, {0}], the rows of the split", split.length());
        return Err(refused("whole", "batch, rows and keys", value, expected));
    }
    let Score { scale, softcap, .. } = whole.score;
    let plain = whole.score == Score { scale, softcap, ..Score::default() }
        && whole.programs.is_empty()
        && whole.scales.is_empty()
        && whole.lengths.is_even()
        && whole.storage == Storage::Rows
        && whole.dtypes.one().is_some();
    let plain = plain && whole.pass.invariant().is_none();
    if !plain || whole.pass.is_backward() || whole.pass.continues() {
        let expected = "the forward pass of one type, with a band, a scale and a softcap alone";
        return Err(refused("whole", "features", "other ones", expected));
    }
    Ok(())
}
