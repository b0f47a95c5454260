//! The gate on the kernels of the fused family: right ones pass on every torture problem, and every fault put into one
//! is refused.

use flashcore_lab as lab;
use kernels::{Arch, Plan};
use lab::gate::mutate::{Fault, mutant, sites};
use lab::gate::{Proof, Settings, Verdict, prove, prove_family, torture};
use lab::launchfile::Bound;
use problem::{DType, Layout, Mask, Problem};

fn fused(problem: &Problem) -> Bound {
    let arch = Arch::SM_80;
    let mut plan = Plan::default_for(problem, &arch).unwrap();
    let Plan::Mma(genes) = &mut plan;
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

/// Every site of every fault, on a problem with tails, a mask and several blocks of keys.
#[test]
fn every_fault_is_refused() {
    let problem = Problem::new(1, 1, 150, 64, DType::F16).with_seq_kv(201, Layout::Bhsd).with_mask(Mask::Causal);
    let right = fused(&problem);
    let mut survivors = Vec::new();
    for fault in Fault::ALL {
        for site in 0..sites(&right.kernel, fault) {
            let kernel = mutant(&right.kernel, fault, site).unwrap();
            let wrong = Bound { kernel, ..right.clone() };
            match prove(&wrong, &Settings::quick()) {
                Ok(proof) if proof.verdict == Verdict::Refuted => {
                    println!("{fault:?} {site}: {}", proof.reasons[0]);
                }
                Ok(proof) => survivors.push(format!("{fault:?} {site}: {}", show(&proof))),
                Err(error) => println!("{fault:?} {site}: {error}"),
            }
        }
    }
    assert_eq!(survivors, [""; 0]);
}
