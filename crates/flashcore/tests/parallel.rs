//! Sharded attention on ranks that are threads, against attention in one call.

#[path = "common/draw.rs"]
mod draw;

use std::collections::BTreeSet;
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use draw::draw;
use flashcore::parallel::{
    ChannelRank, Collectives, GroupError, SequenceSplit, ShardSchedule, host_ranks, join_ranks,
    merge_over_group, thread_ranks,
};
use flashcore::{
    Attention, AttentionError, Device, E4m3, Element, Gradients, Layout, LengthValues, Output, TableView,
    TensorView, attention, library as lib,
};
use half::{bf16, f16};

const ROWS: usize = 37;
const HEADS: usize = 12;
const DIM: usize = 16;
const DIM_V: usize = 8;
const DOCUMENTS: [usize; 5] = [0, 5, 6, 20, 37];

const MASKS: [&str; 9] =
    ["full", "causal", "left", "both", "right", "wide", "chunk", "mask tensor", "causal mask tensor"];
const SCORES: [&str; 9] =
    ["plain", "scale", "softcap", "alibi", "alibi of batch", "sink", "sink and alibi", "bias", "program"];
const SPLITS: [&str; 5] =
    ["zigzag", "contiguous", "zigzag of documents", "contiguous documents", "documents"];
const SCHEDULES: [&str; 5] = ["all-gather", "sliced", "ring", "ulysses", "ulysses and ring"];
const DTYPES: [&str; 3] = ["f32", "bf16", "f16"];
const HEADS_KV: [usize; 4] = [12, 4, 2, 1];

/// A value of each factor, by its number.
type Case = [usize; 7];
const COUNTS: Case =
    [MASKS.len(), SCORES.len(), SPLITS.len(), SCHEDULES.len(), DTYPES.len(), HEADS_KV.len(), 4];

/// Whether a case may exist; a factor without a value may have any.
fn is_possible(case: [Option<usize>; 7]) -> bool {
    let heads = case[5].map(|heads| HEADS_KV[heads]);
    let ranks = case[6].map(|ranks| ranks + 1);
    match case[3].map(|schedule| SCHEDULES[schedule]) {
        Some("sliced") => heads.is_none_or(|heads| heads % 2 == 0),
        Some("ulysses") => {
            heads.zip(ranks).is_none_or(|(heads, ranks)| heads % ranks == 0 || ranks % heads == 0)
        }
        Some("ulysses and ring") => ranks.is_none_or(|ranks| ranks % 2 == 0),
        _ => true,
    }
}

/// Cases in which each value of each factor meets each value of each other factor.
fn every_pair() -> Vec<Case> {
    let pairs_of = |case: [Option<usize>; 7]| {
        let given: Vec<_> = case.into_iter().enumerate().filter_map(|(i, x)| Some((i, x?))).collect();
        let pairs = (0..given.len()).flat_map(|a| (0..a).map(move |b| (a, b)));
        pairs.map(|(a, b)| (given[b], given[a])).collect::<BTreeSet<_>>()
    };
    let mut missing: BTreeSet<((usize, usize), (usize, usize))> = BTreeSet::new();
    for a in 0..7 {
        for b in a + 1..7 {
            for (x, y) in (0..COUNTS[a]).flat_map(|x| (0..COUNTS[b]).map(move |y| (x, y))) {
                let mut case = [None; 7];
                (case[a], case[b]) = (Some(x), Some(y));
                if is_possible(case) {
                    missing.insert(((a, x), (b, y)));
                }
            }
        }
    }
    let mut cases = Vec::new();
    while let Some(&((a, x), (b, y))) = missing.first() {
        let mut case = [None; 7];
        (case[a], case[b]) = (Some(x), Some(y));
        // Factors that bound each other come first.
        for factor in [3, 6, 5, 0, 1, 2, 4] {
            if case[factor].is_none() {
                let extended = (0..COUNTS[factor]).map(|value| {
                    let mut case = case;
                    case[factor] = Some(value);
                    case
                });
                let possible = extended.filter(|&case| is_possible(case));
                case = possible.max_by_key(|&case| pairs_of(case).intersection(&missing).count()).unwrap();
            }
        }
        missing = &missing - &pairs_of(case);
        cases.push(case.map(Option::unwrap));
    }
    cases
}

/// The tensors of the whole sequence, `[batch, head, row, dim]`, and the arrays of features.
struct Whole {
    batch: usize,
    heads_kv: usize,
    documents: Vec<usize>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    d_out: Vec<f32>,
    sinks: Vec<f32>,
    slopes: Vec<f32>,
    bias: Vec<f32>,
    mask: Vec<bool>,
}

impl Whole {
    fn new(documents: &[usize], heads_kv: usize) -> Whole {
        let entries = if documents.len() > 2 { documents.len() - 1 } else { 2 };
        let batch = if documents.len() > 2 { 1 } else { 2 };
        let longest = documents.windows(2).map(|ends| ends[1] - ends[0]).max().unwrap();
        let tensor = |heads, dim, seed| draw(batch * heads * ROWS * dim, seed);
        Whole {
            batch,
            heads_kv,
            documents: documents.to_vec(),
            q: tensor(HEADS, DIM, 1),
            k: tensor(heads_kv, DIM, 2),
            v: tensor(heads_kv, DIM_V, 3),
            d_out: tensor(HEADS, DIM_V, 4),
            sinks: draw(HEADS, 5),
            slopes: draw(entries * HEADS, 6),
            bias: draw(HEADS * longest * longest, 7),
            mask: draw(entries * longest * longest, 8).iter().map(|&x| x > -0.4).collect(),
        }
    }

    /// The call with its features.
    fn featured<'a, T: Element>(
        &'a self,
        call: Attention<'a, T>,
        mask: &str,
        score: &str,
    ) -> Attention<'a, T> {
        let longest = (self.bias.len() / HEADS).isqrt();
        let entries = self.mask.len() / longest / longest;
        let masked = |call: Attention<'a, T>| {
            call.mask(TableView::dense(&self.mask[..], &[entries, 1, longest, longest]).unwrap())
        };
        let call = match mask {
            "full" => call,
            "causal" => call.causal(),
            "left" => call.window(7, 0),
            "both" => call.window(3, 4),
            "right" => call.band("window:inf:5".parse().unwrap()),
            "wide" => call.band("window:20:inf".parse().unwrap()),
            "chunk" => call.mask_program(lib::chunk(8)),
            "mask tensor" => masked(call),
            _ => masked(call.causal()),
        };
        let call = if score.contains("sink") { call.sink(&self.sinks) } else { call };
        match score {
            "scale" => call.scale(0.4),
            "softcap" => call.softcap(2.0),
            "alibi" | "sink and alibi" => call.alibi(&self.slopes[..HEADS]),
            "alibi of batch" => call.alibi(&self.slopes),
            "bias" => call.bias(TableView::dense(&self.bias, &[1, HEADS, longest, longest]).unwrap()),
            "program" => {
                // The length and the positions, through parameters of the caller.
                let far = (lib::query() - lib::key()).abs() * lib::float(0);
                call.score(lib::score() + far + lib::key_length() * lib::int(0) * 0.01)
                    .parameters(&[0.05], &[2])
            }
            _ => call,
        }
        .device(Device::Cpu)
    }

    /// O, the LSE and all gradients of one call, with elements of type `T`.
    fn run<T: Element>(&self, mask: &str, score: &str) -> [Vec<f32>; 7] {
        let ends: Vec<i32> = self.documents.iter().map(|&end| end as i32).collect();
        let [q, k, v, d_out] = [&self.q, &self.k, &self.v, &self.d_out].map(|x| narrow::<T>(x));
        let view =
            |x, heads, dim| TensorView::dense(x, [self.batch, heads, ROWS, dim], Layout::Bhsd).unwrap();
        let kv = self.heads_kv;
        let mut call = attention(view(&q, HEADS, DIM), view(&k, kv, DIM), view(&v, kv, DIM_V));
        if ends.len() > 2 {
            let lengths =
                LengthValues { cumulative_q: &ends, cumulative_kv: &ends, ..LengthValues::default() };
            call = call.lengths(lengths);
        }
        let call = self.featured(call, mask, score);
        let made = call.clone().run().unwrap();
        let out = view(&made.data, HEADS, DIM_V);
        let found = call.backward(out, &made.lse, view(&d_out, HEADS, DIM_V)).unwrap();
        results(made, found)
    }
}

fn narrow<T: Element>(x: &[f32]) -> Vec<T> {
    x.iter().map(|&x| T::from_f32(x)).collect()
}

fn wide<T: Element>(x: &[T]) -> Vec<f32> {
    x.iter().map(|x| x.to_f32()).collect()
}

const NAMES: [&str; 7] = ["out", "lse", "dq", "dk", "dv", "d_sinks", "d_tables"];

fn results<T: Element>(made: Output<T>, found: Gradients<T>) -> [Vec<f32>; 7] {
    let Gradients { dq, dk, dv, d_sinks, d_tables } = found;
    [wide(&made.data), made.lse, wide(&dq), wide(&dk), wide(&dv), d_sinks, d_tables.concat()]
}

/// The results of all ranks.
fn on_ranks<R: Send>(ranks: usize, of: impl Fn(&mut ChannelRank) -> R + Sync) -> Vec<R> {
    let group = thread_ranks(ranks, Duration::from_secs(100));
    thread::scope(|scope| {
        let of = &of;
        let threads: Vec<_> = group.into_iter().map(|mut rank| scope.spawn(move || of(&mut rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The Frobenius norm of the differences. Two infinities of one sign do not differ.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let square = |(&a, &b): (&f32, &f32)| if a == b { 0.0 } else { (f64::from(a) - f64::from(b)).powi(2) };
    a.iter().zip(b).map(square).sum::<f64>().sqrt()
}

fn split_of(name: &str, ranks: usize) -> SequenceSplit {
    let documents = if name.contains("documents") { &DOCUMENTS[..] } else { &[0, ROWS] };
    match name {
        "documents" => SequenceSplit::by_documents(documents, ranks),
        _ if name.starts_with("zigzag") => SequenceSplit::zigzag(documents, ranks),
        _ => SequenceSplit::contiguous(documents, ranks),
    }
    .unwrap()
}

fn schedule_of(name: &str) -> ShardSchedule {
    match name {
        "all-gather" => ShardSchedule::AllGather,
        "sliced" => ShardSchedule::Sliced { slices: 2 },
        "ring" => ShardSchedule::Ring,
        "ulysses" => ShardSchedule::Ulysses,
        _ => ShardSchedule::UlyssesRing { together: 2 },
    }
}

/// Asserts that each result of each rank has at most twice the error of one call.
fn compare<T: Element + Default>(case: Case) {
    let [mask, score, split, schedule, _, heads_kv, ranks] = case;
    let (mask, score, heads_kv, ranks) = (MASKS[mask], SCORES[score], HEADS_KV[heads_kv], ranks + 1);
    let split = &split_of(SPLITS[split], ranks);
    let schedule = schedule_of(SCHEDULES[schedule]);
    let whole = &Whole::new(split.documents(), heads_kv);
    let exact = &whole.run::<f32>(mask, score);
    let single = &whole.run::<T>(mask, score);
    let found = on_ranks(ranks, |group| sharded::<T>(group, whole, split, schedule, mask, score));
    for (rank, found) in found.iter().enumerate() {
        let extents = [(HEADS, DIM_V), (HEADS, 1), (HEADS, DIM), (heads_kv, DIM), (heads_kv, DIM_V)];
        for (i, found) in found.iter().enumerate() {
            let shard = |x: &Vec<f32>| match extents.get(i) {
                None => x.clone(),
                Some(&(heads, dim)) => {
                    let mut shard = split.shard(x, rank, [whole.batch * heads, dim]).unwrap();
                    if i == 1 {
                        let padding = |(at, x): (usize, &mut f32)| {
                            *x = if at % split.rows() < split.used(rank) { *x } else { f32::NEG_INFINITY };
                        };
                        shard.iter_mut().enumerate().for_each(padding);
                    }
                    shard
                }
            };
            let (exact, single) = (shard(&exact[i]), shard(&single[i]));
            let size =
                exact.iter().filter(|x| x.is_finite()).map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
            let (error, accepted) = (distance(found, &exact), distance(&single, &exact));
            // Parts of a result are rounded before they are added.
            let limit = 2.0 * accepted + 2e-6 * (1.0 + size);
            let name = NAMES[i];
            assert!(
                error <= limit,
                "{case:?} {name} of rank {rank}: an error of {error:.2e}, not {limit:.2e}"
            );
        }
    }
}

/// The results of a rank, and the sums over ranks of the gradients of sinks and tables.
fn sharded<T: Element + Default>(
    group: &mut ChannelRank,
    whole: &Whole,
    split: &SequenceSplit,
    schedule: ShardSchedule,
    mask: &str,
    score: &str,
) -> [Vec<f32>; 7] {
    let (rank, rows, kv) = (group.rank(), split.rows(), whole.heads_kv);
    let shard = |x: &[f32], heads: usize, dim| {
        split.shard(&narrow::<T>(x), rank, [whole.batch * heads, dim]).unwrap()
    };
    let (q, k, v) = (shard(&whole.q, HEADS, DIM), shard(&whole.k, kv, DIM), shard(&whole.v, kv, DIM_V));
    let d_out = shard(&whole.d_out, HEADS, DIM_V);
    let view = |x, heads, dim| TensorView::dense(x, [whole.batch, heads, rows, dim], Layout::Bhsd).unwrap();
    let call = attention(view(&q, HEADS, DIM), view(&k, kv, DIM), view(&v, kv, DIM_V));
    let call = whole.featured(call, mask, score).sharded(split).schedule(schedule);
    let made = call.clone().run(group).unwrap();
    let out = view(&made.data, HEADS, DIM_V);
    let mut found = call.backward(group, out, &made.lse, view(&d_out, HEADS, DIM_V)).unwrap();
    group.sum(&mut found.d_sinks).unwrap();
    found.d_tables.iter_mut().for_each(|table| group.sum(table).unwrap());
    results(made, found)
}

fn compare_any(case: Case) {
    match DTYPES[case[4]] {
        "f32" => compare::<f32>(case),
        "bf16" => compare::<bf16>(case),
        _ => compare::<f16>(case),
    }
}

#[test]
fn every_pair_of_features_agrees_with_one_call() {
    every_pair().into_iter().for_each(compare_any);
}

#[test]
fn causal_attention_agrees_on_every_split() {
    for split in 0..SPLITS.len() {
        for schedule in 0..SCHEDULES.len() {
            let cases = (0..4).map(|ranks| [1, 0, split, schedule, 0, 0, ranks]);
            cases.filter(|case| is_possible(case.map(Some))).for_each(compare_any);
        }
    }
}

#[test]
fn inputs_of_8_bits_agree_with_one_call() {
    let whole = &Whole::new(&[0, ROWS], 4);
    let factors = &draw(2 * 4, 9).iter().map(|x| x.abs() + 0.5).collect::<Vec<_>>();
    fn call<'a>([q, k, v]: [&'a [E4m3]; 3], rows: usize, factors: &'a [f32]) -> Attention<'a, E4m3> {
        let view = |x, heads, dim| TensorView::dense(x, [2, heads, rows, dim], Layout::Bhsd).unwrap();
        let call = attention(view(q, HEADS, DIM), view(k, 4, DIM), view(v, 4, DIM_V));
        call.descale(factors, factors, factors).causal().device(Device::Cpu)
    }
    let [q, k, v] = &[&whole.q, &whole.k, &whole.v].map(|x| narrow::<E4m3>(x));
    let one = &call([q, k, v], ROWS, factors).run_as::<f32>().unwrap();
    for schedule in [ShardSchedule::Sliced { slices: 2 }, ShardSchedule::Ring, ShardSchedule::Ulysses] {
        on_ranks(2, |group| {
            let split = &SequenceSplit::zigzag(&[0, ROWS], 2).unwrap();
            let shard = |x, heads, dim| split.shard(x, group.rank(), [2 * heads, dim]).unwrap();
            let (q, k, v) = (shard(q, HEADS, DIM), shard(k, 4, DIM), shard(v, 4, DIM_V));
            let call = call([&q, &k, &v], split.rows(), factors).sharded(split).schedule(schedule);
            let out = call.run_as::<f32>(group).unwrap();
            let out = split.unshard(group, &out.data, [2 * HEADS, DIM_V]).unwrap();
            // Weights are rounded to 8 bits, relative to the largest of the keys of a call.
            let error = distance(&out, &one.data) / distance(&one.data, &vec![0.0; out.len()]);
            assert!(error < 1e-2, "{schedule:?}: {error}");
        });
    }
}

#[test]
fn results_over_the_keys_of_each_rank_merge() {
    let (q, k, v) = (draw(3 * HEADS * 2 * DIM, 1), draw(3 * 4 * 24 * DIM, 2), draw(3 * 4 * 24 * DIM_V, 3));
    let sinks = &draw(HEADS, 4);
    let used = [24, 5, 1];
    // The keys from `first` on, of which each sequence has `used`.
    let run = |first: usize, keys: usize, used: &[i32], with_sink: bool| {
        let query = TensorView::dense(&q, [3, HEADS, 2, DIM], Layout::Bhsd).unwrap();
        let view = |x, dim| {
            let x: &[f32] = x;
            let strides = Layout::Bhsd.strides(4, 24, dim);
            TensorView::strided(&x[first * dim..], [3, 4, keys, dim], strides).unwrap()
        };
        let call = attention(query, view(&k, DIM), view(&v, DIM_V)).device(Device::Cpu);
        let call = call.lengths(LengthValues { used_kv: used, ..LengthValues::default() });
        if with_sink { call.sink(sinks) } else { call }.run().unwrap()
    };
    let whole = &run(0, 24, &used, true);
    for ranks in [1, 2, 4] {
        let found = on_ranks(ranks, |group| {
            let (rank, each) = (group.rank(), 24 / ranks);
            let here = used.map(|used| (used - (rank * each) as i32).clamp(0, each as i32));
            let mut made = run(rank * each, each, &here, rank == 0);
            merge_over_group(group, &mut made).unwrap();
            assert!(distance(&made.data, &whole.data) < 1e-5 && distance(&made.lse, &whole.lse) < 1e-5);
            made.data
        });
        assert!(found.iter().all(|bits| *bits == found[0]), "all ranks have equal bits");
    }
}

/// A call of zeros with a change on some ranks; its error.
fn changed(group: &mut ChannelRank, ranks: &[usize], change: &str) -> Result<(), AttentionError> {
    let here = if ranks.contains(&group.rank()) { change } else { "" };
    let rows = if here == "rows" { 6 } else { 8 };
    let of = if here == "ranks" { 2 } else { group.ranks() };
    let (batch, heads) = (if here == "batch" { 2 } else { 1 }, if here == "heads" { 4 } else { 2 });
    let zeros = vec![0.0f32; batch * heads * rows * DIM];
    let documents = [0, 8 * group.ranks()];
    let split = match here {
        "contiguous" => SequenceSplit::contiguous(&documents, of),
        _ => SequenceSplit::zigzag(&documents, of),
    }?;
    let x = TensorView::dense(&zeros, [batch, heads, rows, DIM], Layout::Bhsd)?;
    let call = attention(x, x, x).device(Device::Cpu);
    let call = match here {
        "full" => call,
        "cap" => call.causal().softcap(2.0),
        "sinks" => call.causal().sink(&[0.0; 3]),
        "bias" => call.causal().bias(TableView::dense(&[0.0f32; 8], &[8])?),
        "lengths" => call.lengths(LengthValues { used_kv: &[3], ..LengthValues::default() }),
        _ => call.causal(),
    };
    let schedule = match here {
        "ring" => ShardSchedule::Ring,
        "slices" => ShardSchedule::Sliced { slices: 3 },
        "ulysses" => ShardSchedule::Ulysses,
        "together" => ShardSchedule::UlyssesRing { together: 2 },
        _ => ShardSchedule::AllGather,
    };
    let call = call.sharded(&split).schedule(schedule);
    if here == "backward" {
        let lse = vec![0.0; heads * rows];
        return call.backward(group, x, &lse, x).map(|_| ());
    }
    call.run(group).map(|_| ())
}

#[test]
fn ranks_that_differ_are_an_error_on_each() {
    for (change, argument) in [
        ("batch", "the shape of q"),
        ("heads", "the shape of q"),
        ("full", "the band"),
        ("cap", "the scale and the cap"),
        ("contiguous", "the split"),
        ("ring", "the schedule"),
        ("backward", "the pass"),
    ] {
        for told in on_ranks(3, |group| changed(group, &[1], change)) {
            let Err(AttentionError::Group(GroupError::Differs { argument: named, rank: 1, value, expected })) =
                told
            else {
                panic!("{change}: {told:?}");
            };
            assert!(named == argument && value != expected, "{change}: {named}");
        }
    }
}

#[test]
fn a_rank_that_refuses_is_an_error_on_each() {
    for (change, words) in [
        (
            "rows",
            "invalid value '6' for the number of rows of q: expected 8, the rows of a shard of this split",
        ),
        ("ranks", "invalid value '2' for the number of ranks of split: expected 3, those of the group"),
        ("sinks", "invalid value '3' for the number of elements of sink: expected heads_q = 2"),
        ("bias", "for the shape of bias: expected one that broadcasts to"),
        ("lengths", "for the use in a sharded call of used_kv: expected none: the split states documents"),
        ("slices", "invalid value '3' for the number of slices of schedule: expected a divisor of 2"),
        (
            "ulysses",
            "invalid value '3' for the number of ranks together of schedule: expected a divisor of 2",
        ),
        (
            "together",
            "invalid value '2' for the number of ranks together of schedule: expected a divisor of 3",
        ),
    ] {
        let told = on_ranks(3, |group| {
            // The group can be used after a refusal.
            let told = changed(group, &[2], change);
            changed(group, &[], "").unwrap();
            told
        });
        let refused = Err(AttentionError::Group(GroupError::Refused { rank: 2 }));
        assert_eq!(told[..2], [refused.clone(), refused], "{change}");
        let own = told[2].as_ref().unwrap_err().to_string();
        assert!(own.contains(words), "{change}: {own}");
    }
    for documents in [&[0, 9, 5][..], &[1, 9], &[], &[0]] {
        let told = SequenceSplit::contiguous(documents, 2).unwrap_err().to_string();
        assert!(told.contains("first rows of documents: expected ascending numbers from 0"), "{told}");
    }
}

#[test]
fn a_rank_that_ends_is_an_error_on_the_others() {
    for pass in ["", "backward"] {
        let told = on_ranks(3, |group| {
            changed(group, &[], "").unwrap();
            if group.rank() == 2 {
                group.leave(); // as a rank that ends does
            }
            changed(group, &[0, 1, 2], pass)
        });
        for (rank, told) in told.iter().enumerate() {
            let ended = |told: &GroupError| match told {
                GroupError::Ended { rank: of, .. } => rank < 2 && *of == rank,
                GroupError::Left { rank: of } => rank == 2 && *of == 2,
                _ => false,
            };
            assert!(matches!(told, Err(AttentionError::Group(told)) if ended(told)), "{told:?}");
        }
    }
}

/// The address at which a child process joins, as rank 2 of 3.
const CHILD: &str = "FLASHCORE_TEST_RANK_ADDRESS";

/// The child of the next test: it computes until it is killed.
#[test]
fn a_rank_of_its_own_process() {
    let Ok(address) = std::env::var(CHILD) else { return };
    let mut group = join_ranks(address, 2, 3, Duration::from_secs(100)).unwrap();
    while changed(&mut group, &[], "").is_ok() {}
}

#[test]
fn a_process_that_is_killed_is_an_error_on_the_others() {
    let time_out = Duration::from_secs(100);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "a_rank_of_its_own_process"]).env(CHILD, address.to_string());
    let mut child = command.stdout(Stdio::null()).spawn().unwrap();
    thread::scope(|scope| {
        let rank_1 = scope.spawn(move || {
            let mut group = join_ranks(address, 1, 3, time_out).unwrap();
            while changed(&mut group, &[], "").is_ok() {}
            changed(&mut group, &[], "")
        });
        let mut group = host_ranks(&listener, 3, time_out).unwrap();
        (0..3).for_each(|_| changed(&mut group, &[], "").unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        let told = std::iter::repeat_with(|| changed(&mut group, &[], "")).find_map(Result::err).unwrap();
        assert!(matches!(told, AttentionError::Group(GroupError::Ended { rank: 0, .. })), "{told:?}");
        let left = AttentionError::Group(GroupError::Left { rank: 1 });
        assert_eq!(rank_1.join().unwrap(), Err(left));
    });
}

#[test]
fn ranks_that_do_not_meet_are_an_error_in_time() {
    let time_out = Duration::from_millis(200);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let told = host_ranks(&listener, 2, time_out).unwrap_err().to_string();
    assert_eq!(told, "rank 0 could not wait for other ranks: rank 1 has not joined in time");
    let told = join_ranks(address, 2, 2, time_out).unwrap_err().to_string();
    assert_eq!(told, "rank 2 could not join: invalid value '2' for rank: expected 1 to 1");
    drop(listener);
    let told = join_ranks(address, 1, 2, time_out).unwrap_err().to_string();
    assert!(told.starts_with("rank 1 could not connect: "), "{told}");
}

#[test]
fn shards_hold_each_row_once() {
    let numbers: Vec<i32> = (0..ROWS as i32).collect();
    for name in SPLITS {
        for ranks in 1..=5 {
            let split = split_of(name, ranks);
            let mut held = Vec::new();
            for rank in 0..ranks {
                let shard = split.shard(&numbers, rank, [1, 1]).unwrap();
                assert_eq!(shard.len(), split.rows());
                let positions = split.positions(rank);
                for (row, position) in shard.into_iter().zip(positions).take(split.used(rank)) {
                    let first = split.documents().iter().rfind(|&&first| first <= row as usize).unwrap();
                    assert_eq!(position, row - *first as i32);
                    held.push(row);
                }
            }
            held.sort_unstable();
            assert_eq!(held, numbers, "{name} on {ranks}");
        }
    }
}
