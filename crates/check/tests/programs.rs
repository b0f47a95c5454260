//! The gate on score and mask programs, attention sinks and what combines with them: in every family, pairs of
//! features pass, and kernels of slightly different problems fail.

#[path = "common/programs.rs"]
mod features;

use emu::Schedule;
use features::{FEATURES, Feature, draft};
use flashcore_check::gate::inputs::Style;
use flashcore_check::gate::{Settings, Verdict, bind, check_kernel};
use flashcore_check::launchfile::Bound;
use kernels::{Arch, Family};
use problem::program::library as lib;
use problem::{Band, DType, Expr, Layout, Problem, Program, Programs, Table, TableType};

const SCHEDULES: [Schedule; 3] = [Schedule::Late, Schedule::Early, Schedule::Random];
/// A Hopper GPU with so few SMs that a CTA computes several tiles.
const SMALL: Arch = Arch { multiprocessors: 3, ..Arch::SM_90 };

/// Ragged lengths, few queries, and rows that see no key where a causal band is added.
const LENGTHS: [(usize, usize); 5] = [(70, 90), (33, 33), (1, 75), (90, 41), (17, 130)];

/// A problem with two features. Type, group size and lengths follow the number.
fn pair(first: &Feature, second: &Feature, number: usize) -> Problem {
    let (seq_q, seq_kv) = LENGTHS[number % LENGTHS.len()];
    let dtype = [DType::F16, DType::Bf16][number / 2 % 2];
    let (batch, heads, heads_kv) = [(2, 2, 2), (1, 5, 1), (1, 8, 1)][number % 3];
    let dim = [32, 64][number / 3 % 2];
    let mut problem = Problem::new(batch, heads, seq_q, dim, dtype)
        .with_seq_kv(seq_kv, Layout::Bshd)
        .with_heads_kv(heads_kv, Layout::Bshd)
        .with_lse(true);
    problem.score.scale = (number % 7 == 3).then_some(-0.2);
    draft(problem, &[first, second])
}

fn once(number: usize) -> Settings {
    let run = (Style::Normal, number as u64, SCHEDULES[number % 3]);
    Settings { runs: vec![run], lagging: false, ..Settings::quick() }
}

#[test]
fn pairs_of_features_pass_in_every_family() {
    let mut number = 0;
    for (i, first) in FEATURES.iter().enumerate() {
        for second in &FEATURES[i + 1..] {
            for family in Family::ALL {
                number += 1;
                let problem = pair(first, second, number);
                let name = format!("{} {} {family:?} {problem:?}", first.name, second.name);
                let plan = family.default_for(&problem, &SMALL).unwrap_or_else(|e| panic!("{name}: {e}"));
                let bound = bind(&plan, &problem, &SMALL).unwrap_or_else(|e| panic!("{name}: {e}"));
                let settings = if number % 16 == 0 { Settings::quick() } else { once(number) };
                let report = check_kernel(&bound, &settings).unwrap_or_else(|e| panic!("{name}: {e}"));
                assert_eq!(
                    report.verdict,
                    Verdict::Passed,
                    "{name}\n{:?}\n{:?}",
                    report.reasons,
                    report.hazards
                );
            }
        }
    }
}

/// A problem with an expression as score or mask program, for four heads that share two key heads.
fn problem(score: Option<Expr>, mask: Option<Expr>) -> Problem {
    let mut problem = Problem::new(1, 4, 70, 64, DType::Bf16)
        .with_seq_kv(90, Layout::Bhsd)
        .with_heads_kv(2, Layout::Bhsd)
        .with_lse(true);
    let program = |expr: Expr| Program::new(&expr).unwrap();
    problem.programs = Programs {
        score: score.map(program),
        mask: mask.map(program),
        floats: vec![3.0],
        ints: vec![7],
        tables: vec![Table::dense(TableType::F32, &[1, 4, 70, 90]), Table::dense(TableType::F32, &[1, 4])],
    };
    problem
}

/// Checks the kernel of `emitted` as if it were one of `judged`.
fn verdict(family: Family, emitted: &Problem, judged: &Problem) -> Verdict {
    let plan = family.default_for(emitted, &Arch::SM_90).unwrap();
    let program = kernels::emit(emitted, &plan, &Arch::SM_90).unwrap();
    let bound = Bound::of_program(program, judged);
    check_kernel(&bound, &once(1)).unwrap().verdict
}

/// Each right problem with a wrong one: a bias of another head or row, slopes of another head, a mask before
/// the cap, a mask that is dropped, and a sink that is dropped.
#[test]
fn kernels_of_other_programs_fail() {
    let bias =
        |head: Expr, query: Expr| lib::score() + Expr::load(0, true, [lib::batch(), head, query, lib::key()]);
    let slopes = |head: Expr| {
        let distance = (lib::level() - lib::key()).abs();
        lib::score() - Expr::load(1, true, [lib::batch(), head]) * distance
    };
    let next = |index: Expr, last: i32| (index + 1).min(last);
    let mask = || lib::dilated(lib::int(0));
    let capped = |score: Expr| (score / lib::float(0)).tanh() * lib::float(0);
    let with_sink = |mut problem: Problem| {
        problem.score.sink = true;
        problem
    };
    let right_bias = problem(Some(bias(lib::head(), lib::query())), None);
    let right_slopes = problem(Some(slopes(lib::head())), None);
    let masked = problem(None, Some(mask()));
    let cap_then_mask = problem(None, Some(mask())).with_softcap(3.0);
    let mask_then_cap = problem(Some(capped(mask().select(lib::score(), f32::NEG_INFINITY))), None);
    for (name, right, wrong) in [
        ("head of the bias", &right_bias, problem(Some(bias(next(lib::head(), 3), lib::query())), None)),
        ("row of the bias", &right_bias, problem(Some(bias(lib::head(), next(lib::query(), 69))), None)),
        ("head of the slopes", &right_slopes, problem(Some(slopes(next(lib::head(), 3))), None)),
        ("mask before the cap", &cap_then_mask, mask_then_cap),
        ("no mask", &masked, problem(None, None)),
        ("no sink", &with_sink(masked.clone()), masked.clone()),
    ] {
        for family in Family::ALL {
            assert_eq!(verdict(family, right, right), Verdict::Passed, "{name} {family:?}");
            assert_eq!(verdict(family, &wrong, right), Verdict::Failed, "{name} {family:?}");
        }
    }
}

/// A sink that counts twice fails, also where several warps share the keys.
#[test]
fn sinks_that_count_twice_fail() {
    let mut problem = problem(None, None).with_band(Band::window(20, 0));
    problem.score.sink = true;
    for family in Family::ALL {
        let plan = family.default_for(&problem, &Arch::SM_90).unwrap();
        let bound = bind(&plan, &problem, &Arch::SM_90).unwrap();
        let verdict = |bound: &Bound| check_kernel(bound, &once(1)).unwrap().verdict;
        assert_eq!(verdict(&bound), Verdict::Passed, "{family:?}");
        assert_eq!(verdict(&doubled_sinks(&bound)), Verdict::Failed, "{family:?}");
    }
}

/// The kernel with sinks that are a power of two larger, as if each was added twice.
fn doubled_sinks(bound: &Bound) -> Bound {
    let text = bound.kernel.module.to_string();
    let mut lines: Vec<String> = Vec::new();
    let mut sink: Option<String> = None;
    for line in text.lines() {
        lines.push(line.to_owned());
        let words: Vec<&str> = line.split([' ', ',', ';']).filter(|word| !word.is_empty()).collect();
        match (words.as_slice(), &sink) {
            ([load, to, ..], _) if *load == "ld.global.nc.f32" => sink = Some((*to).to_owned()),
            ([_, to, from, ..], Some(loaded)) if from == loaded => {
                lines.push(format!("    add.rn.f32 {to}, {to}, 0f3F800000;"));
                sink = None;
            }
            _ => {}
        }
    }
    assert_ne!(lines.len(), text.lines().count());
    let mut mutant = bound.clone();
    mutant.kernel.module = ptx::parse(&lines.join("\n")).unwrap().verify().unwrap();
    mutant
}
