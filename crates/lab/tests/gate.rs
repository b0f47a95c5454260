//! The gate on the kernels of the fused family: right ones pass on every torture problem, and every fault put into one
//! is refused.

use flashcore_lab as lab;
use kernels::forward::mma::{Grid, MmaPlan, QueryHome};
use kernels::{Arch, Plan};
use lab::gate::mutate::{Fault, mutant, sites};
use lab::gate::{Proof, Settings, Verdict, prove, prove_family, torture};
use lab::launchfile::Bound;
use problem::{DType, Layout, Mask, Problem};

fn fused(problem: &Problem) -> Bound {
    let arch = Arch::SM_80;
    let mut plan = Plan::default_for(problem, &arch).unwrap();
    let Plan::Mma(genes) = &mut plan else { panic!("the default is of the mma family") };
    genes.lse = true;
    Bound::of_kernel(kernels::emit(problem, &plan, &arch).unwrap(), problem).unwrap()
}

fn show(proof: &Proof) -> String {
    format!("{}: {:#?}", proof.verdict, proof.reasons)
}

#[test]
fn the_fused_family_is_proven_on_the_torture_set() {
    for dtype in [DType::F16, DType::Bf16] {
        let problems = torture::problems(dtype, 64);
        let proof = prove_family(&problems, &Settings::quick(), |p| Some(fused(p))).unwrap();
        assert_eq!(proof.verdict, Verdict::Proven, "{dtype} {}", show(&proof));
    }
}

#[test]
fn the_fused_kernel_is_proven_on_every_style() {
    let problem = Problem::new(1, 2, 150, 64, DType::F16).with_mask(Mask::Causal);
    let proof = prove(&fused(&problem), &Settings::thorough()).unwrap();
    assert_eq!(proof.verdict, Verdict::Proven, "{}", show(&proof));
    assert_eq!(proof.runs as usize, Settings::thorough().runs.len());
}

/// Two stages of 64 keys, 64 rows: a plan of its own, so that better defaults do not move the sites of the faults.
fn small_tiles(problem: &Problem) -> Bound {
    let arch = Arch::SM_80;
    let genes = MmaPlan {
        block_m: 64,
        block_n: 64,
        warps: 4,
        stages: 2,
        resident_ctas: None,
        queries: QueryHome::Registers,
        grid: Grid::RowsFirst,
        lse: true,
        ..MmaPlan::default_for(problem, &arch)
    };
    Bound::of_kernel(kernels::emit(problem, &Plan::Mma(genes), &arch).unwrap(), problem).unwrap()
}

/// Problems with a mask, several blocks of keys, and tails that end in each of a tile's four quarters of 16 rows: a bound
/// that is off by one in one quarter shows only where a tail ends there.
fn with_tails() -> Vec<Bound> {
    [(146, 201), (170, 217), (189, 239), (135, 249), (192, 256)]
        .into_iter()
        .map(|(seq_q, seq_kv)| {
            let problem = Problem::new(1, 1, seq_q, 64, DType::F16).with_seq_kv(seq_kv, Layout::Bhsd);
            small_tiles(&problem.with_mask(Mask::Causal))
        })
        .collect()
}

/// Why the first of the problems that refuses the fault does so; `None` when all of them let it pass.
fn refusal(problems: &[Bound], fault: Fault, site: usize) -> Option<String> {
    problems.iter().find_map(|right| {
        let kernel = mutant(&right.kernel, fault, site)?;
        match prove(&Bound { kernel, ..right.clone() }, &Settings::quick()) {
            Ok(proof) => (proof.verdict == Verdict::Refuted).then(|| proof.reasons.join("; ")),
            Err(error) => Some(error.to_string()),
        }
    })
}

#[test]
fn every_fault_is_refused_for_its_reason() {
    let problems = with_tails();
    let mut survivors = Vec::new();
    for fault in Fault::ALL {
        let (reasons, step) = match fault {
            Fault::DropBarrier => (vec!["race at"], 1),
            Fault::DropAsyncWait => (vec!["async_not_waited at"], 1),
            Fault::DropCopy => (vec!["uninitialised_read at", "wrong answer"], 1),
            Fault::BoundTooLarge | Fault::ComparisonOffByOne => {
                (vec!["out_of_bounds at", "unwritten_output at", "uninitialised_read at", "wrong answer"], 3)
            }
            // One for each element of a tile; they are all alike.
            Fault::SkipRescale => (vec!["wrong answer"], 9),
            Fault::WrongScale => (vec!["wrong answer"], 1),
            Fault::SkipStore => (vec!["unwritten_output at"], 1),
            Fault::DropFence => (vec![""], 1),
        };
        for site in (0..sites(&problems[0].kernel, fault)).step_by(step) {
            match refusal(&problems, fault, site) {
                Some(refusal) => {
                    assert!(reasons.iter().any(|r| refusal.contains(r)), "{fault:?} {site}: {refusal}");
                }
                None => survivors.push(format!("{fault:?} {site}")),
            }
        }
    }
    println!("{survivors:?}");
    assert_eq!(survivors, EQUIVALENT);
}

/// Faults that are none. With the queries in registers each warp stages its output where only it has read: the last barrier
/// orders nothing in this plan.
const EQUIVALENT: [&str; 1] = ["DropBarrier 3"];
