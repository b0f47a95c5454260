//! Tests of equal bits: a row has the same bits of O and of the LSE in every batch, on every number of SMs,
//! and in every phase. GPU kernels run in the emulator, those of the CPU natively.

mod calls;

use attend::Rescale;
use calls::{Call, Case, GROUP, Part, Queries, Results, Store};
use cpu::{CpuPlan, Isa};
use emu::{Emulator, Options};
use flashcore_check::gate::{Feed, bind, trial};
use kernels::forward::decode::DecodePlan;
use kernels::{Arch, Plan};
use problem::{Band, DType, DTypes, Invariant, Problem, Tensor};

/// Keys of a block of [`small`].
const BLOCK: usize = 32;
/// Keys of a piece of it.
const PIECE: usize = 64;

/// A plan of the generator of invariant plans, with small pieces. The problem does not ask for it, so that
/// its genes may be others.
fn small(problem: &Problem) -> DecodePlan {
    let plan = shipped(problem);
    DecodePlan { warps: 2, warp_keys: 16, piece: Some(PIECE as u32), stages: 2, resident_ctas: 1, ..plan }
}

/// The plan that an invariant problem gets.
fn shipped(problem: &Problem) -> DecodePlan {
    let problem = problem.clone().with_invariant(Invariant::Phase);
    match Plan::default_for(&problem, &Arch::SM_90).unwrap() {
        Plan::Decode(plan) => plan,
        other => panic!("{other:?}"),
    }
}

/// Runs a call in the emulator on a GPU with so many SMs.
fn emulated(call: &Call, sms: u32, plan: impl Fn(&Problem) -> DecodePlan) -> Results {
    let problem = call.problem();
    let arch = Arch { multiprocessors: sms, ..Arch::SM_90 };
    let plan = plan(&problem);
    let bound = bind(&Plan::Decode(plan.clone()), &problem, &arch)
        .unwrap_or_else(|error| panic!("{plan:?} {problem:?}: {error}"));
    let feed = Feed::of(call.inputs(&problem));
    let trial = trial(&mut Emulator::new(Options::default()), &bound, &feed, None).unwrap();
    assert!(trial.reasons.is_empty(), "{plan:?} {problem:?}: {:?}", trial.reasons);
    let outputs = trial.outputs(&bound);
    let (out, lse) = outputs.split_at(problem.span(Tensor::Out).unwrap().0 * problem.dtypes.out.bytes());
    let lse: Vec<u32> = lse.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    call.results(&problem, out, &lse)
}

/// Runs a call on the processor.
fn native(call: &Call, plan: impl Fn(&Problem) -> CpuPlan) -> Results {
    let problem = call.problem();
    let (out, lse) = call.inputs(&problem).attention(&problem, &plan(&problem)).unwrap();
    let lse: Vec<u32> = lse.iter().map(|lse| lse.to_bits()).collect();
    call.results(&problem, &out.to_bytes(), &lse)
}

/// The rows of `found` whose bits are not those of `expected`.
fn differing(expected: &Results, found: &Results) -> Vec<(u64, usize, usize)> {
    let differs = |place: &&(u64, usize, usize)| expected[*place] != found[*place];
    found.keys().filter(|place| expected.contains_key(place)).filter(differs).copied().collect()
}

/// The lengths at which something begins or ends, several pieces, and a prime.
fn lengths(block: usize, piece: usize) -> Vec<usize> {
    vec![1, block - 1, block, block + 1, piece - 1, piece, piece + 1, 3 * piece, 5 * piece - 7, 211]
}

/// Cases of both types, with the features that the family has.
fn cases() -> Vec<Case> {
    let causal = Case::causal(64, DType::F16);
    vec![
        causal.clone(),
        Case { softcap: Some(20.0), sink: true, ..Case::causal(64, DType::Bf16) },
        Case { band: Band::window(90, 0), ..Case::causal(128, DType::Bf16) },
        Case { band: Band::window(37, 0), dim: 128, sink: true, ..causal },
        Case::causal(64, "bf16/e4m3/e4m3".parse::<DTypes>().unwrap()),
    ]
}

/// The rows of sequences alone, one call for each.
fn alone(sequences: &[(u64, usize)], run: impl Fn(&Call) -> Results, case: &Case) -> Results {
    let of = |&sequence: &(u64, usize)| run(&Call::decode(case, &[sequence], Store::Strided));
    sequences.iter().flat_map(of).collect()
}

/// Batches of 2, 5 and 64 with the sequences in other orders, each once with more SMs than the other.
fn batches(sequences: &[(u64, usize)]) -> Vec<Vec<(u64, usize)>> {
    let many =
        (0..64).map(|i| if i % 7 == 3 { sequences[i / 7] } else { (100 + i as u64, 1 + 37 * i % 150) });
    let reversed: Vec<_> = sequences.iter().rev().copied().collect();
    let pairs = sequences.chunks(2).map(<[_]>::to_vec);
    pairs.chain(reversed.chunks(5).map(<[_]>::to_vec)).chain([many.collect()]).collect()
}

#[test]
fn rows_do_not_depend_on_the_batch_or_the_number_of_sms() {
    let sequences: Vec<(u64, usize)> = (0..).zip(lengths(BLOCK, PIECE)).collect();
    for (i, case) in cases().iter().enumerate() {
        let expected = alone(&sequences, |call| emulated(call, 1, small), case);
        for (j, batch) in batches(&sequences).iter().enumerate() {
            let store = [Store::Pages(16), Store::Strided, Store::Packed, Store::Pages(5)][(i + j) % 4];
            let found = emulated(&Call::decode(case, batch, store), [3, 7, 16, 40][j % 4], small);
            let differing = differing(&expected, &found);
            assert!(differing.is_empty(), "{case:?} {store:?} {batch:?}: {differing:?}");
        }
    }
}

/// Keys that are cut evenly over the grid give other bits in other batches and grids.
#[test]
fn pieces_of_the_grid_are_found() {
    let free = |problem: &Problem| DecodePlan { piece: None, ..small(problem) };
    let case = &cases()[0];
    let sequences: Vec<(u64, usize)> = (0..).zip(lengths(BLOCK, PIECE)).collect();
    let expected = alone(&sequences, |call| emulated(call, 1, free), case);
    let found = emulated(&Call::decode(case, &sequences, Store::Strided), 7, free);
    assert!(!differing(&expected, &found).is_empty());
}

/// The rows of a prefill in one call.
fn prefilled(case: &Case, sequence: (u64, usize), run: impl Fn(&Call) -> Results) -> Results {
    run(&Call::prefill(case, sequence, sequence.1, Store::Strided)[0])
}

#[test]
fn decode_and_chunks_give_the_rows_of_a_prefill() {
    let length = 3 * PIECE + 5;
    for (i, case) in cases().iter().enumerate() {
        let expected = prefilled(case, (9, length), |call| emulated(call, 5, small));
        assert_eq!(expected.len(), length * 2 * GROUP);
        for (j, chunk) in [1, 7, 16, PIECE, 101].into_iter().enumerate() {
            let store = [Store::Strided, Store::Pages(16), Store::Pages(3), Store::Packed][(i + j) % 4];
            let calls = Call::prefill(case, (9, length), chunk, store);
            let found: Results =
                calls.iter().flat_map(|call| emulated(call, [4, 1, 9][j % 3], small)).collect();
            assert_eq!(found.len(), expected.len());
            let differing = differing(&expected, &found);
            assert!(differing.is_empty(), "{case:?} {store:?} chunks of {chunk}: {differing:?}");
        }
    }
}

/// A launch that mixes chunks and single rows of other sequences, with packed queries.
#[test]
fn mixed_launches_give_the_rows_of_a_prefill() {
    for (case, sms) in cases().iter().zip([2, 6, 11, 30, 5]) {
        let lengths = [(1, 150), (2, 2 * PIECE), (3, 77)];
        let expected: Results =
            lengths.iter().flat_map(|&of| prefilled(case, of, |call| emulated(call, 4, small))).collect();
        let part = |sequence, rows| Part { sequence, rows };
        let parts = vec![part(3, 76..77), part(1, 40..150), part(2, 0..65), part(1, 39..40)];
        let found = emulated(&Call::new(case, parts, Store::Pages(16), Queries::Packed), sms, small);
        let differing = differing(&expected, &found);
        assert!(differing.is_empty(), "{case:?}: {differing:?}");
    }
}

/// A vote of the warp on rescaling lets a row depend on the other rows of its tile.
#[test]
fn votes_of_the_warp_are_found() {
    let votes = |problem: &Problem| DecodePlan { rescale: Rescale::Beyond(2), ..small(problem) };
    let case = &cases()[0];
    let expected = prefilled(case, (9, 150), |call| emulated(call, 5, votes));
    let calls = Call::prefill(case, (9, 150), 1, Store::Strided);
    let found: Results = calls.iter().flat_map(|call| emulated(call, 5, votes)).collect();
    assert!(!differing(&expected, &found).is_empty());
}

/// The plans that invariant problems get, around the ends of their pieces.
#[test]
fn shipped_plans_keep_both_promises() {
    for case in [Case::causal(128, DType::Bf16), Case::causal(64, DType::F16)] {
        let plan = shipped(&Call::decode(&case, &[(0, 1)], Store::Strided).problem());
        let piece = plan.piece.unwrap() as usize;
        let sequences = [(0, piece - 1), (1, piece + 1), (2, 2 * piece + 13)];
        let expected = alone(&sequences, |call| emulated(call, 132, shipped), &case);
        let found = emulated(&Call::decode(&case, &sequences, Store::Pages(16)), 3, shipped);
        assert_eq!(differing(&expected, &found), []);
        let chunk = |(sequence, end)| Part { sequence, rows: end - 20..end };
        let parts = sequences.map(chunk).to_vec();
        let found = emulated(&Call::new(&case, parts, Store::Packed, Queries::Packed), 7, shipped);
        assert_eq!(differing(&expected, &found), []);
    }
}

/// Other plans are refused by name.
#[test]
fn plans_that_break_a_promise_are_refused() {
    let problem = Call::decode(&cases()[0], &[(0, 300)], Store::Strided).problem();
    for invariant in Invariant::ALL {
        let problem = problem.clone().with_invariant(invariant);
        let told =
            |plan: DecodePlan| Plan::Decode(plan).check(&problem, &Arch::SM_90).unwrap_err().to_string();
        let shipped = shipped(&problem);
        Plan::Decode(shipped.clone()).check(&problem, &Arch::SM_90).unwrap();
        let start = format!("invalid value '{invariant}' for invariant with family decode: expected genes");
        for plan in [
            DecodePlan { piece: None, ..shipped.clone() },
            DecodePlan { rescale: Rescale::Beyond(8), ..shipped.clone() },
            DecodePlan { warp_keys: 16, ..shipped },
        ] {
            let told = told(plan);
            assert!(told.starts_with(&start), "{told}");
        }
        let other = kernels::Family::Mma.default_for(&problem, &Arch::SM_90).unwrap_err().to_string();
        assert_eq!(
            other,
            format!("invalid value '{invariant}' for invariant with family mma: expected family decode")
        );
    }
}

/// Every instruction set that keeps the promises natively, with the plans for 1, 3 and 8 threads.
#[test]
fn the_cpu_keeps_both_promises() {
    let invariant = |isa: Isa, threads: usize| {
        move |problem: &Problem| {
            let problem = problem.clone().with_invariant(Invariant::Phase);
            CpuPlan { threads, ..CpuPlan::with_isa(&problem, isa) }
        }
    };
    let f32 = Case { band: Band::window(60, 0), ..Case::causal(72, DType::F32) };
    let isas = Isa::available().into_iter().filter(|isa| isa.wide() == *isa);
    for (isa, case) in
        isas.flat_map(|isa| cases().into_iter().chain([f32.clone()]).map(move |case| (isa, case)))
    {
        let length = 333;
        let expected = prefilled(&case, (9, length), |call| native(call, invariant(isa, 3)));
        for (j, chunk) in [1, 5, 16, 100].into_iter().enumerate() {
            let store = [Store::Strided, Store::Pages(16), Store::Pages(3), Store::Packed][j];
            let calls = Call::prefill(&case, (9, length), chunk, store);
            let found: Results =
                calls.iter().flat_map(|call| native(call, invariant(isa, [1, 8][j % 2]))).collect();
            assert_eq!(differing(&expected, &found), [], "{isa} {case:?} {store:?} chunks of {chunk}");
        }
        let part = |sequence, rows| Part { sequence, rows };
        let parts = vec![part(4, 0..90), part(9, 200..333), part(5, 899..900), part(9, 150..151)];
        let found = native(&Call::new(&case, parts, Store::Packed, Queries::Packed), invariant(isa, 2));
        assert_eq!(differing(&expected, &found), [], "{isa} {case:?} in a batch");
    }
}

/// The plans of other problems give a row of a decode other bits than the row of the prefill.
#[test]
fn plans_of_the_cpu_that_are_free_are_found() {
    let free = |problem: &Problem| CpuPlan::for_threads(problem, 4);
    let case = Case::causal(64, DType::Bf16);
    let expected = prefilled(&case, (9, 400), |call| native(call, free));
    let found = native(&Call::decode(&case, &[(9, 400)], Store::Strided), free);
    assert!(!differing(&expected, &found).is_empty());
    let problem = Problem::new(1, 2, 40, 64, DType::Bf16).with_invariant(Invariant::Batch);
    let plan = CpuPlan { splits: 2, block_kv: 8, ..CpuPlan::for_threads(&problem, 2) };
    let told = plan.check(&problem).unwrap_err().to_string();
    assert!(
        told.starts_with("invalid value 'batch' for invariant with this plan: expected isa = "),
        "{told}"
    );
    CpuPlan::for_threads(&problem, 2).check(&problem).unwrap();
}
