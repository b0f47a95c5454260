//! Tests of the gate with descale factors beside score and mask programs: in both families with 8-bit inputs,
//! programs beside every other feature pass with each layout of factors, and kernels that forget the factors
//! fail.

use crate::common::programs::{FEATURES, Feature, draft};
use crate::common::{SMALL, plain_mma};
use attend::{Order, Packing, Tiles};
use emu::Schedule;
use filetest::is_due;
use flashcore_check::gate::{Settings, Verdict, bind, check_kernel};
use flashcore_check::launchfile::Bound;
use judge::inputs::Style;
use kernels::forward::mma::MmaPlan;
use kernels::forward::wgmma::{Diagonal, Ends, Rescaling, WgmmaPlan};
use kernels::{Arch, Family, Plan};
use problem::{DTypes, Layout, Problem, ScaleLayout, Scales};
use tile::Handout;

const SCHEDULES: [Schedule; 3] = [Schedule::Late, Schedule::Early, Schedule::Random];

/// Ragged lengths, few queries, and rows that see no key where a causal band is added.
const LENGTHS: [(usize, usize); 5] = [(70, 200), (33, 70), (1, 150), (150, 41), (17, 130)];

/// Rows that share a factor of Q, K and V: 0 for one factor of each head, 1 for one of the tensor.
const LAYOUTS: [[u32; 3]; 7] =
    [[1, 1, 1], [0, 0, 0], [64, 64, 64], [128, 128, 128], [64, 0, 1], [1, 64, 0], [0, 128, 64]];

/// The problem with descale factors of its 8-bit inputs.
fn with_factors(problem: Problem, [q, k, v]: [u32; 3]) -> Problem {
    let of = |rows, seq| match rows {
        0 => ScaleLayout::per_head(problem.heads_kv),
        1 => ScaleLayout::TENSOR,
        rows => ScaleLayout::per_block(problem.heads_kv, seq, rows),
    };
    let scales = Scales {
        q: Some(of(q, problem.seq_q)),
        k: Some(of(k, problem.seq_kv)),
        v: problem.dtypes.v.is_fp8().then(|| of(v, problem.seq_kv)),
    };
    Problem { scales, ..problem }
}

/// A problem with features and factors. Types, group size, lengths and factors follow the number.
fn factored(features: &[&Feature], number: usize) -> Problem {
    let (seq_q, seq_kv) = LENGTHS[number % LENGTHS.len()];
    let types: [DTypes; 4] = ["e4m3", "e5m2/e4m3/e4m3", "e4m3/e5m2/bf16", "e5m2:f16"]
        .map(|types| types.parse().expect("types of Q, K, V and O"));
    let (batch, heads, heads_kv) = [(2, 2, 2), (1, 5, 1), (1, 8, 2)][number % 3];
    let mut problem = Problem::new(batch, heads, seq_q, [32, 64][number / 3 % 2], types[number % 4])
        .with_seq_kv(seq_kv, Layout::Bshd)
        .with_heads_kv(heads_kv, Layout::Bshd)
        .with_lse(true);
    problem.score.scale = (number % 11 == 3).then_some(-0.2);
    with_factors(draft(problem, features), LAYOUTS[number % LAYOUTS.len()])
}

fn settings(style: Style, number: usize) -> Settings {
    let run = (style, number as u64, SCHEDULES[number % 3]);
    Settings { runs: vec![run], lagging: false, ..Settings::quick() }
}

const FAMILIES: [Family; 2] = [Family::Mma, Family::Wgmma];

fn arch(family: Family) -> Arch {
    if family == Family::Mma { Arch::SM_89 } else { SMALL }
}

fn passes(bound: &Bound, settings: &Settings, name: &str) {
    let report = check_kernel(bound, settings).unwrap_or_else(|e| panic!("{name}: {e}"));
    assert_eq!(report.verdict, Verdict::Passed, "{name}\n{:?}\n{:?}", report.reasons, report.hazards);
}

#[test]
fn programs_pass_beside_every_other_feature_in_both_families() {
    let mut number = 0;
    for (i, first) in FEATURES.iter().enumerate() {
        for second in &FEATURES[i + 1..] {
            for family in FAMILIES {
                number += 1;
                let problem = factored(&[first, second], number);
                // One of the families for each pair.
                if problem.programs.is_empty() || !is_due(number + number / FAMILIES.len(), 2) {
                    continue;
                }
                let name = format!("{} {} {family:?} {problem:?}", first.name, second.name);
                let plan = family.default_for(&problem, &arch(family));
                let plan = plan.unwrap_or_else(|e| panic!("{name}: {e}"));
                let bound = bind(&plan, &problem, &arch(family)).unwrap_or_else(|e| panic!("{name}: {e}"));
                let style = [Style::Normal, Style::Rising, Style::BadFactors][number / 2 % 3];
                passes(&bound, &settings(style, number), &name);
            }
        }
    }
}

fn of_names(names: &[&str]) -> Vec<&'static Feature> {
    let of_name = |name| FEATURES.iter().find(|feature| feature.name == name).expect("a feature");
    names.iter().map(|&name| of_name(name)).collect()
}

/// Plans with features that defaults do not use: keys divided among warps and among CTAs, speculation, halved
/// diagonals, overlapped tiles, skips, packed heads.
fn variants(problem: &Problem) -> Vec<Plan> {
    let plain = MmaPlan { block_n: 64, ..plain_mma(problem, &SMALL) };
    let mma = [
        MmaPlan { products: Order::ScoresAhead, ..plain.clone() },
        MmaPlan { kv_warps: 2, block_m: 16, block_n: 128, ..plain.clone() },
        MmaPlan { splits: 2, ..plain },
    ];
    let plain = WgmmaPlan {
        consumers: 2,
        block_n: 64,
        stages: 2,
        tiles: Tiles::InTurn,
        ends: Ends::Own,
        handout: Handout::Static,
        packing: Packing::Apart,
        rescale: Rescaling::Beyond(0),
        ..WgmmaPlan::default_for(problem, &SMALL)
    };
    let speculative = Rescaling::Speculative { beyond: 2, limit: 8 };
    let wgmma = [
        WgmmaPlan { rescale: speculative, tiles: Tiles::Overlapped, ..plain.clone() },
        WgmmaPlan { diagonal: Diagonal::Halved, tiles: Tiles::Overlapped, ..plain.clone() },
        WgmmaPlan { packing: Packing::Packed, rescale: speculative, ..plain.clone() },
        WgmmaPlan { consumers: 1, ends: Ends::Common, products: Order::InTurn, ..plain },
    ];
    mma.into_iter().map(Plan::Mma).chain(wgmma.into_iter().map(Plan::Wgmma)).collect()
}

#[test]
fn variants_of_plans_pass() {
    let sets = [["alibi", "causal"], ["bias", "sink"], ["document", "causal"], ["t5", "softcap"]];
    let mut ran = [0; 7];
    for (i, names) in sets.iter().enumerate() {
        for layout in [[0, 0, 0], [64, 64, 64], [1, 64, 0]] {
            let dense = Problem::new(1, 4, 150, 64, "e4m3".parse::<DTypes>().expect("types"))
                .with_seq_kv(155, Layout::Bshd)
                .with_heads_kv(2, Layout::Bshd)
                .with_lse(true);
            let problem = with_factors(draft(dense, &of_names(names)), layout);
            for (j, plan) in variants(&problem).into_iter().enumerate() {
                if let Err(reason) = plan.check(&problem, &SMALL) {
                    let reason = reason.to_string();
                    // A halved diagonal needs a causal mask, and a list of blocks excludes some genes.
                    let known = ["mask", "visits = listed"].iter().any(|known| reason.contains(known));
                    assert!(known, "{plan:?}: {reason}");
                    continue;
                }
                ran[j] += 1;
                let bound = bind(&plan, &problem, &SMALL).expect("the plan was checked");
                let style = [Style::Normal, Style::Rising, Style::BadFactors][(i + j) % 3];
                passes(&bound, &settings(style, i + j), &format!("{names:?} {layout:?} {plan:?}"));
            }
        }
    }
    assert!(ran.iter().all(|&times| times > 0), "{ran:?}");
}

/// The kernel with the factors of heads forgotten before the score program: its logits have the softmax scale
/// alone.
fn forgetful(bound: &Bound) -> Bound {
    let text = bound.kernel.module.to_string();
    let mut factor = None;
    let mut forgotten = 0;
    let lines: Vec<String> = text
        .lines()
        .map(|line| {
            let words: Vec<&str> =
                line.split(['\t', ' ', ',', ';']).filter(|word| !word.is_empty()).collect();
            match words[..] {
                ["ld.param.f32", to, from] if from.contains("logit_factor") => factor = Some(to.to_owned()),
                ["mul.rn.f32", to, from, by] if Some(from) == factor.as_deref() && by.starts_with('%') => {
                    forgotten += 1;
                    return format!("mov.f32 {to}, {from};");
                }
                _ => {}
            }
            line.to_owned()
        })
        .collect();
    assert_eq!(forgotten, 1, "{text}");
    let module = ptx::parse(&lines.join("\n")).expect("PTX").verify().expect("well-formed PTX");
    let mut mutant = bound.clone();
    mutant.kernel.module = module.clone();
    mutant.then.iter_mut().for_each(|kernel| kernel.module = module.clone());
    mutant
}

/// Kernels without one factor of the scores fail, and so do kernels that forget the factors before a score
/// program.
#[test]
fn kernels_without_a_factor_fail() {
    for (i, names) in [["alibi", "causal"], ["relative bias", "sink"], ["chunk", "causal"]].iter().enumerate()
    {
        let dense = Problem::new(1, 4, 130, 64, "e4m3".parse::<DTypes>().expect("types"))
            .with_seq_kv(150, Layout::Bshd)
            .with_heads_kv(2, Layout::Bshd)
            .with_lse(true);
        let dense = draft(dense, &of_names(names));
        for (family, layout) in FAMILIES.into_iter().flat_map(|f| [[0, 0, 0], [64, 64, 64]].map(|l| (f, l))) {
            let name = format!("{names:?} {family:?} {layout:?}");
            let right = with_factors(dense.clone(), layout);
            let arch = arch(family);
            let plan = family.default_for(&right, &arch).expect("a default plan");
            let settings = settings(Style::Normal, i);
            let verdict = |bound: &Bound| check_kernel(bound, &settings).expect("a run").verdict;
            let bound = bind(&plan, &right, &arch).expect("a default plan");
            passes(&bound, &settings, &name);
            let [mut no_queries, mut no_keys] = [right.clone(), right.clone()];
            (no_queries.scales.q, no_keys.scales.k) = (None, None);
            for wrong in [no_queries, no_keys] {
                let program = kernels::emit(&wrong, &plan, &arch).expect("fewer factors fit as well");
                assert_eq!(verdict(&Bound::of_program(program, &right)), Verdict::Failed, "{name}");
            }
            if layout == [0, 0, 0] && right.programs.score.is_some() {
                assert_eq!(verdict(&forgetful(&bound)), Verdict::Failed, "{name}");
            }
        }
    }
}
