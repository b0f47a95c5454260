//! Tests of the gate with the backward pass: score and mask programs, and the gradients of sinks and tables.

use std::iter;

use emu::{HazardKind, Schedule};
use flashcore_check::gate::{Settings, bind, check_kernel};
use flashcore_check::launchfile::Bound;
use judge::inputs::Style;
use kernels::backward::fused::FusedPlan;
use kernels::backward::split::SplitPlan;
use kernels::{Arch, KernelError, Plan, PlanError, emit};
use problem::{Band, Corner, DType, ElementType, Gradients, Layout, Pass, Problem, Program, Programs, Table};
use ptx::{Arg, Item, Kernel};

use crate::common::passes;

const SCHEDULES: [Schedule; 3] = [Schedule::Late, Schedule::Early, Schedule::Random];
/// Ragged lengths, both ways, with rows that see no key under a causal band.
const LENGTHS: [(usize, usize); 4] = [(70, 90), (90, 41), (17, 130), (65, 64)];

/// A problem with groups of 1, 3 and 8 query heads.
fn problem(number: usize) -> Problem {
    let (seq_q, seq_kv) = LENGTHS[number % LENGTHS.len()];
    let (batch, heads, heads_kv) = [(2, 2, 2), (2, 3, 1), (1, 8, 1)][number % 3];
    let corner = [Corner::BottomRight, Corner::TopLeft][number / 2 % 2];
    let bands = [Band::FULL, Band { corner, ..Band::CAUSAL }, Band { corner, ..Band::window(20, 5) }];
    Problem::new(batch, heads, seq_q, 32, [DType::F16, DType::Bf16][number % 2])
        .with_seq_kv(seq_kv, Layout::Bshd)
        .with_heads_kv(heads_kv, Layout::Bshd)
        .with_band(bands[number / 3 % 3])
}

fn program(text: &str) -> Option<Program> {
    Some(text.parse().unwrap_or_else(|error| panic!("{text}: {error}")))
}

/// The pass with every gradient that the problem has.
fn differentiated(problem: Problem) -> Problem {
    let is_float = |table: &Table| table.dtype.is_float();
    let tables = problem.programs.tables.iter().enumerate();
    let tables = tables.map(|(i, table)| u8::from(is_float(table)) << i).sum();
    let wants = Gradients { sinks: problem.score.sink, tables };
    problem.with_pass(Pass::Backward { deterministic: true, d_lse: true, wants })
}

fn small_plan(problem: &Problem, arch: &Arch) -> Plan {
    Plan::BackwardSplit(SplitPlan {
        dq_rows: 32,
        dq_keys: 16,
        dq_warps: 2,
        dkv_keys: 32,
        dkv_rows: 16,
        dkv_warps: 2,
        ..SplitPlan::default_for(problem, arch)
    })
}

fn check(problem: &Problem, plan: &Plan, number: usize) {
    check_on(problem, plan, number, &Arch::SM_80);
}

fn check_on(problem: &Problem, plan: &Plan, number: usize, arch: &Arch) {
    let run = (Style::Normal, number as u64, SCHEDULES[number % 3]);
    let settings = Settings { runs: vec![run], lagging: false, ..Settings::quick() };
    let bound = bind(plan, problem, arch).unwrap_or_else(|error| panic!("{problem:?}: {error}"));
    passes(&check_kernel(&bound, &settings).unwrap(), &(problem, plan));
}

/// Sinks, with even, packed and used lengths.
#[test]
fn gradients_of_sinks_are_right() {
    for number in 0..9 {
        let mut p = problem(number);
        p.score.sink = true;
        let lengths = &mut p.lengths;
        match number / 3 {
            0 => {}
            1 => (lengths.q.packed, lengths.kv.packed) = (Some(75), Some(95)),
            _ => (lengths.q.used, lengths.kv.used, lengths.left_padded) = (true, true, true),
        }
        let p = differentiated(p.with_layout(Layout::Bshd));
        check(&p, &small_plan(&p, &Arch::SM_80), number);
    }
}

/// The sinks' gradients of the Hopper family, with a softcap and without.
#[test]
fn gradients_of_sinks_are_right_in_the_fused_family() {
    for (number, dim) in [64, 128, 64].into_iter().enumerate() {
        let mut p = Problem::new(2, 6, 150, dim, [DType::F16, DType::Bf16][number % 2]);
        (p.heads_kv, p.seq_kv) = (2, 140);
        (p.score.sink, p.score.softcap) = (true, (number > 0).then_some(3.0));
        let wants = Gradients { sinks: true, tables: 0 };
        let pass = Pass::Backward { deterministic: false, d_lse: true, wants };
        let p = p.with_layout(Layout::Bhsd).with_band(Band::CAUSAL).with_pass(pass);
        let plan = Plan::BackwardFused(FusedPlan::default_for(&p, &Arch::SM_90));
        check_on(&p, &plan, number, &Arch::SM_90);
    }
}

/// The Hopper family passes with any number of resident CTAs, whichever starts first. A note says that its dQ
/// depends on the order of CTAs, unless the pass has to be deterministic.
#[test]
fn only_deterministic_gradients_of_the_fused_family_have_no_note() {
    for (pass, dim) in [
        (Pass::BACKWARD, 64),
        (Pass::DETERMINISTIC, 64),
        (Pass::DETERMINISTIC, 128),
        (Pass::DETERMINISTIC, 256),
    ] {
        let problem = Problem::new(1, 1, 200, dim, DType::Bf16).with_seq_kv(300, Layout::Bhsd);
        let problem = problem.with_pass(pass);
        let plan = Plan::BackwardFused(FusedPlan::default_for(&problem, &Arch::SM_90));
        let bound = bind(&plan, &problem, &Arch::SM_90).unwrap();
        let settings = Settings { lagging: true, ..Settings::quick().first_run() };
        let report = check_kernel(&bound, &settings).unwrap();
        passes(&report, &plan);
        let notes = report.notes.iter().filter(|note| note.kind == HazardKind::Nondeterministic);
        assert_eq!(notes.count() == 0, pass.deterministic(), "{plan:?}: {:?}", report.notes);
    }
}

/// Programs whose derivative by the score is a constant, depends on positions, on tables and on the score,
/// with and without a softcap, and masks.
#[test]
fn programs_are_differentiated() {
    let programs = [
        ("s * float(k + 1) * 0.02 - float(q) * 0.01", "", None),
        ("tanh(s / f0) * f0 / float(h + 1)", "", None),
        ("s * s * 0.25", "(q + k) % 5 != 0", None),
        ("select(s > 0.2, s, s * 0.5)", "", Some(3.0)),
        ("s * t0[k] + exp2(s * 0.125)", "n1[q] == n1[k]", Some(80.0)),
        ("", "(k / 8) % 3 != 1", Some(2.0)),
        ("", "(n1[k] == n1[q]) & (k * 2 > q)", None),
        ("float(k - q) * 0.03", "", None),
        ("s + float(b + h) + float(i0)", "k != i0", Some(100.0)),
        // The exponentials of rows beyond the queries are infinite.
        ("float(q - k) * 2.0", "", None),
        ("float(k - q) * 2.0", "", None),
    ];
    for (number, (score, mask, softcap)) in programs.into_iter().enumerate() {
        let mut p = problem(number);
        let longest = p.seq_q.max(p.seq_kv);
        p.score.softcap = softcap;
        p.score.scale = (number % 4 == 1).then_some(-0.2);
        p.programs = Programs {
            score: (!score.is_empty()).then(|| program(score)).flatten(),
            mask: (!mask.is_empty()).then(|| program(mask)).flatten(),
            floats: vec![2.5],
            ints: vec![3],
            tables: vec![
                Table::dense(ElementType::Bf16, &[longest]),
                Table::dense(ElementType::I32, &[longest]),
            ],
        };
        let pass = Pass::Backward { deterministic: true, d_lse: false, wants: Gradients::NONE };
        let p = p.with_pass(pass).with_layout(Layout::Bhsd);
        check(&p, &small_plan(&p, &Arch::SM_80), number);
    }
}

/// The default plans of other head dims, whose warps may divide the head dims.
#[test]
fn programs_run_with_default_plans() {
    for (number, (dim, dim_v)) in [(64, 64), (128, 128), (192, 128), (256, 256)].into_iter().enumerate() {
        let mut p = Problem::new(1, 2, 70, dim, DType::Bf16);
        p.head_dim_v = dim_v;
        p.heads_kv = 1;
        p.programs.score = program("s * t0[h] + t1[h, q, k]");
        p.programs.tables =
            vec![Table::dense(ElementType::F32, &[2]), Table::dense(ElementType::F16, &[2, 70, 70])];
        let p = differentiated(p.with_layout(Layout::Bhsd));
        check(&p, &Plan::BackwardSplit(SplitPlan::default_for(&p, &Arch::SM_80)), number);
    }
}

/// Tables with every set of indices that a gradient may have, dense and with dimensions that repeat.
#[test]
fn gradients_of_tables_are_right() {
    let tables: [(&str, &[char], &[char]); 12] = [
        ("s + t0[b, h, q, k]", &['b', 'h', 'q', 'k'], &[]),
        ("s + t0[b, h, q, k]", &['b', 'h', 'q', 'k'], &['b', 'h']),
        ("s + t0[b, h, q, k]", &['b', 'h', 'q', 'k'], &['b']),
        ("s + t0[b, h, q, k]", &['b', 'h', 'q', 'k'], &['h', 'q']),
        ("s + t0[b, h, q, k]", &['b', 'h', 'q', 'k'], &['k']),
        ("s + t0[k, h, q]", &['k', 'h', 'q'], &[]),
        ("s - t0[h] * float(abs(q - k))", &['h'], &[]),
        ("s - t0[b, h] * float(abs(q - k))", &['b', 'h'], &[]),
        ("s * t0[q] + t1[h, k]", &['q'], &[]),
        ("tanh(s * t0[b]) + t1[h, k]", &['b'], &[]),
        ("s + exp2(t0[q, k])", &['q', 'k'], &['q', 'k']),
        ("s * t0[h, k] + t0[h, k]", &['h', 'k'], &[]),
    ];
    for (number, (score, dimensions, repeated)) in tables.into_iter().enumerate() {
        let mut p = problem(number);
        if number % 4 == 3 {
            (p.lengths.q.packed, p.lengths.kv.used) = (Some(p.seq_q + 9), true);
        }
        p.score.softcap = (number % 5 == 4).then_some(4.0);
        // A table may be larger than the positions.
        let more = number / 2 % 2;
        let extent = |dimension: &char| match dimension {
            'b' => p.batch + more,
            'h' => p.heads_q + more,
            'q' => p.seq_q + more,
            _ => p.seq_kv,
        };
        let extents: Vec<usize> = dimensions.iter().map(extent).collect();
        let mut table = Table::dense([ElementType::F32, ElementType::Bf16][number % 2], &extents);
        for (stride, dimension) in table.strides.iter_mut().zip(dimensions) {
            if repeated.contains(dimension) {
                *stride = 0;
            }
        }
        p.programs.score = program(score);
        p.programs.tables = vec![table, Table::dense(ElementType::F16, &[p.heads_q, p.seq_kv])];
        let p = differentiated(p.with_layout(Layout::Bshd));
        check(&p, &small_plan(&p, &Arch::SM_80), number);
    }
}

/// Tables that are read at expressions, at other tables' elements and at several places, by atomic additions.
#[test]
fn gradients_at_expressions_are_right() {
    let tables: [(&str, &[usize]); 9] = [
        ("s + t0[q - k + 130]", &[300]),
        ("s * t0[h, abs(q - k)]", &[8, 131]),
        ("s + t0[q] * t0[k]", &[131]),
        ("s + t0[q, k] + t0[k, q] * 0.5", &[131, 131]),
        ("s - t0[b, q / 4, k / 8] * float(h)", &[2, 33, 17]),
        ("s + t0[n1[k]]", &[5]),
        ("tanh(s * t0[min(q, k)])", &[131]),
        ("s + t0[q, q]", &[131, 131]),
        // An index is cut at the table's ends.
        ("s + t0[q - k + 3]", &[7]),
    ];
    for (number, (score, extents)) in tables.into_iter().enumerate() {
        let mut p = problem(number);
        if number % 4 == 3 {
            (p.lengths.q.packed, p.lengths.kv.used) = (Some(p.seq_q + 9), true);
        }
        p.score.softcap = (number % 5 == 4).then_some(4.0);
        p.programs.score = program(score);
        let dtype = [ElementType::F32, ElementType::Bf16][number % 2];
        p.programs.tables = vec![Table::dense(dtype, extents), Table::dense(ElementType::I32, &[131])];
        let wants = Gradients { sinks: false, tables: 1 };
        let pass = Pass::Backward { deterministic: false, d_lse: true, wants };
        let p = p.with_layout(Layout::Bshd).with_pass(pass);
        check(&p, &small_plan(&p, &Arch::SM_80), number);
    }
}

/// A deterministic gradient at other indices than positions is refused by the table's name, and so is one
/// whose index depends on the score.
#[test]
fn gradients_at_other_expressions_are_refused() {
    for (score, value, deterministic) in [
        ("s + t0[k - q + 5]", "an index that is an expression", true),
        ("s + t0[k] * t0[q]", "read at two places", true),
        ("s + t0[int(s)]", "an index that depends on the score", false),
    ] {
        let mut p = Problem::new(1, 1, 8, 32, DType::F16);
        p.programs.score = program(score);
        p.programs.tables = vec![Table::dense(ElementType::F32, &[16])];
        let wants = Gradients { sinks: false, tables: 1 };
        let p = p.with_pass(Pass::Backward { deterministic, d_lse: true, wants });
        let plan = small_plan(&p, &Arch::SM_80);
        match emit(&p, &plan, &Arch::SM_80).unwrap_err() {
            KernelError::Plan(PlanError::Problem { what, value: found, .. }) => {
                assert_eq!((what.as_str(), found.as_str()), ("the gradient of table 0", value));
            }
            other => panic!("{other}"),
        }
    }
}

/// The gradients that a check found wrong. Panics if the check found anything else.
fn wrong(bound: &Bound) -> Vec<String> {
    let runs = vec![(Style::Normal, 1, Schedule::Random)];
    let report = check_kernel(bound, &Settings { runs, lagging: false, ..Settings::quick() }).unwrap();
    assert_eq!(report.hazards, [], "{:?}", report.reasons);
    let name = |reason: &String| {
        let rest = reason.strip_prefix("wrong ").unwrap_or_else(|| panic!("{reason}"));
        rest.split(' ').next().unwrap_or_default().to_owned()
    };
    let mut names: Vec<String> = report.reasons.iter().map(name).collect();
    names.dedup();
    names
}

fn kernels(bound: &mut Bound) -> impl Iterator<Item = &mut Kernel> {
    iter::once(&mut bound.kernel).chain(&mut bound.then)
}

/// Changes the argument of a kernel's parameter.
fn with_argument(bound: &mut Bound, entry: &str, name: &str, change: impl FnOnce(&mut Arg)) {
    let kernel = kernels(bound).find(|kernel| kernel.entry == entry).expect("the kernel");
    let parameters = kernel.module.items.iter().find_map(|item| match item {
        Item::Function(function) if function.name.to_string() == entry => Some(&function.params),
        _ => None,
    });
    let at = parameters.expect("the entry").iter().position(|parameter| parameter.name.to_string() == name);
    change(&mut kernel.args[at.unwrap_or_else(|| panic!("{entry} has no {name}"))]);
}

/// Changes the lines of an entry, of which `change` gets the whole list.
fn with_lines(bound: &mut Bound, entry: &str, change: impl FnOnce(&mut Vec<String>)) {
    let text = bound.kernel.module.to_string();
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let start = lines.iter().position(|line| line.contains(&format!(".entry {entry}("))).expect("the entry");
    let after = lines[start + 1..].iter().position(|line| line.contains(".entry "));
    let end = after.map_or(lines.len(), |after| start + 1 + after);
    let mut own: Vec<String> = lines[start..end].to_vec();
    change(&mut own);
    lines.splice(start..end, own);
    let module = ptx::parse(&lines.join("\n")).unwrap().verify().unwrap();
    kernels(bound).for_each(|kernel| kernel.module = module.clone());
}

/// Each fault spoils the gradients that depend on it, and no others.
#[test]
fn faults_are_seen_in_their_gradients() {
    let mut p = Problem::new(1, 2, 64, 32, DType::F16).with_layout(Layout::Bhsd);
    p.programs.score = program("s + t0[h, q, k]");
    p.programs.tables = vec![Table::dense(ElementType::F32, &[2, 64, 64])];
    let p = differentiated(p);
    let plan = small_plan(&p, &Arch::SM_80);
    let fresh = || bind(&plan, &p, &Arch::SM_80).unwrap();
    assert_eq!(wrong(&fresh()), [""; 0]);

    // The scale is missing in dQ, and in dK.
    for (entry, gradient) in [("flash_backward_dq", "dq"), ("flash_backward_dkv", "dk")] {
        let mut bound = fresh();
        with_argument(&mut bound, entry, "scale", |scale| *scale = Arg::F32(1.0));
        assert_eq!(wrong(&bound), [gradient]);
    }

    // dS is rounded to a type with three bits less.
    let mut bound = fresh();
    with_lines(&mut bound, "flash_backward_dq", |lines| {
        let rounded = |line: &String| {
            let rest = line.trim().strip_prefix("cvt.rn.f16x2.f32 ")?;
            let to = rest.split(',').next()?;
            Some(format!("and.b32 {to}, {to}, 0xfff8fff8;"))
        };
        let also = |line: String| iter::once(line.clone()).chain(rounded(&line));
        *lines = std::mem::take(lines).into_iter().flat_map(also).collect();
    });
    assert_eq!(wrong(&bound), ["dq"]);

    // D of the first rows in place of the next: the last numbers of a tile are those of the tile before.
    let mut bound = fresh();
    with_lines(&mut bound, "flash_backward_dkv", |lines| {
        let loads = (0..lines.len()).filter(|&at| lines[at].trim().starts_with("ld.shared.v2.f32"));
        let loads: Vec<usize> = loads.collect();
        let [.., before, last] = loads[..] else { panic!("{} loads of numbers", loads.len()) };
        let place = |line: &str| line.split('[').nth(1).unwrap_or_default().to_owned();
        let to = lines[last].split('[').next().unwrap_or_default().to_owned();
        lines[last] = format!("{to}[{}", place(&lines[before]));
    });
    assert_eq!(wrong(&bound), ["dk"]);

    // The gradient of the bias of the other head.
    let mut bound = fresh();
    with_argument(&mut bound, "flash_backward_dtable_0", "head_stride", |stride| {
        *stride = Arg::I64(-64 * 64)
    });
    with_argument(&mut bound, "flash_backward_dtable_0", "d_table_0", |table| {
        if let Arg::Buffer { offset, .. } = table {
            *offset += 4 * 64 * 64;
        }
    });
    assert_eq!(wrong(&bound), ["d_table_0"]);

    // dQ is converted before its last addition.
    let p = p.with_pass(Pass::BACKWARD);
    let fused = Problem { programs: Programs::default(), ..p };
    let plan = Plan::BackwardFused(FusedPlan::default_for(&fused, &Arch::SM_90));
    let mut bound = bind(&plan, &fused, &Arch::SM_90).unwrap();
    assert_eq!(wrong(&bound), [""; 0]);
    bound.then.swap(0, 1);
    assert_eq!(wrong(&bound), ["dq"]);
}
