//! [`Baked`] states exactly what the code of a plan depends on: drawn problems with equal [`Baked`] have one
//! text, and those with one text have equal [`Baked`].

use std::mem::discriminant;

use flashcore_kernels::{Arch, Baked, Contracts, Family, Plan, bind, emit};
use problem::program::library as lib;
use problem::{
    Band, Corner, DType, DTypes, ElementType, Expr, Layout, PassKind, Problem, Program, Programs,
    ScaleLayout, Scales, Strides, Table,
};
use serde_json::Value;

use crate::common::draw::Draw;
use crate::common::each::each;

/// Drawn problems a family.
const DRAWS: u64 = 110;
/// Other values of what a launch is told, and other properties, for each problem.
const RETOLD: usize = 8;

/// The problem with other lengths, sizes and strides, of which no plan bakes the value itself.
fn retold(draw: &mut Draw, p: &Problem) -> Problem {
    let mut p = p.clone();
    let group = p.group_size();
    if draw.one_in(3) {
        p.heads_kv = draw.of(&[1, 2, 3, 8]);
        p.heads_q = group * p.heads_kv;
    }
    p.batch = draw.of(&[1, 2, 3]);
    p.seq_q = draw.of(&[1, 2, 17, 64, 128, 300, 512, 1000]);
    p.seq_kv =
        if draw.one_in(3) { p.seq_q } else { draw.of(&[0, 1, 63, 64, 128, 129, 256, 384, 512, 1000, 4096]) };
    for bound in [&mut p.band.before, &mut p.band.after].into_iter().flatten() {
        *bound = if *bound == 0 { 0 } else { draw.of(&[1, 5, 64, 500, 3000]) };
    }
    p.score.softcap = p.score.softcap.map(|_| draw.of(&[20.0, 50.0]));
    p.score.scale = p.score.scale.map(|scale| scale * draw.of(&[1.0, 0.25]));
    p.lengths.q.packed = p.lengths.q.packed.map(|_| draw.of(&[1, 300, 2000]));
    p.lengths.kv.packed = p.lengths.kv.packed.map(|_| draw.of(&[0, 1, 300, 2000]));
    p.programs.floats.iter_mut().for_each(|x| *x += 1.0);
    p.programs.ints.iter_mut().for_each(|x| *x += 7);
    let extents = [vec![p.batch, p.heads_q], vec![p.heads_q, draw.of(&[64, 100])]];
    for (table, extents) in p.programs.tables.iter_mut().zip(extents) {
        *table = Table::dense(table.dtype, &extents);
    }
    for scales in [&mut p.scales.q, &mut p.scales.k, &mut p.scales.v].into_iter().flatten() {
        let rows = scales.rows;
        let of_heads = ScaleLayout { rows, block: 2, ..ScaleLayout::per_head(p.heads_kv) };
        *scales = draw.of(&[ScaleLayout { rows, ..ScaleLayout::TENSOR }, of_heads]);
    }
    let mut p = p.with_layout(draw.of(&[Layout::Bhsd, Layout::Bshd]));
    if let Some(pages) = p.storage.pages() {
        p = p.with_pages(pages.rows, draw.of(&[1, 7, 100]));
    }
    match draw.below(8) {
        0 => (p.k.head, p.v.head) = (0, 0),
        1 => (p.k.batch, p.v.batch) = (0, 0),
        2 => p.out = Strides { batch: p.out.batch * 2 + 16, ..p.out },
        3 => p.q.row += 8,
        4 => p.out = Strides { batch: 4 * p.out.batch, head: 4 * p.out.head, row: 4 * p.out.row },
        _ => {}
    }
    p.v_in_k &= p.head_dim >= p.head_dim_v && p.dtypes.k == p.dtypes.v;
    if p.v_in_k {
        p.v = p.k;
    }
    p
}

/// The problem with some properties of another.
fn mixed(draw: &mut Draw, p: &Problem) -> Problem {
    let (mut p, other) = (p.clone(), problem(draw));
    for property in 0..13 {
        if !draw.one_in(6) {
            continue;
        }
        match property {
            0 => p.pass = other.pass,
            1 => (p.head_dim, p.head_dim_v) = (other.head_dim, other.head_dim_v),
            2 => p.dtypes = other.dtypes,
            3 => p.scales = other.scales,
            4 => p.band = other.band,
            5 => p.score.scale = other.score.scale,
            6 => p.score.softcap = other.score.softcap,
            7 => p.score = p.score.with_operands(|operand| other.score.has(operand)),
            8 => p.lengths = other.lengths,
            9 => p.programs = other.programs.clone(),
            10 => p.storage = other.storage,
            11 => p.v_in_k = other.v_in_k,
            _ => (p.heads_q, p.heads_kv) = (other.heads_q, other.heads_kv),
        }
    }
    retold(draw, &p)
}

fn program(expr: Expr) -> Option<Program> {
    Some(Program::new(&expr).expect("a valid program"))
}

fn problem(draw: &mut Draw) -> Problem {
    let (dim, dim_v) =
        draw.of(&[(64, 64), (128, 128), (64, 128), (192, 128), (72, 72), (256, 256), (40, 24), (576, 512)]);
    let dtype = draw.of(&[DType::F16, DType::F16, DType::Bf16, DType::Bf16, DType::E4m3, DType::F32]);
    let mut p = Problem::new(2, 4, 64, dim, dtype).with_lse(draw.one_in(2));
    p.dtypes.tf32 = dtype == DType::F32 && draw.one_in(2);
    if dtype == DType::E4m3 && draw.one_in(2) {
        p.dtypes = DTypes { v: DType::Bf16, out: DType::Bf16, ..p.dtypes };
    }
    p.head_dim_v = dim_v;
    p.v_in_k = draw.one_in(2);
    p.heads_q = 8;
    p.heads_kv = draw.of(&[8, 4, 1]);
    p.band = draw.of(&[
        Band::FULL,
        Band::FULL,
        Band::CAUSAL,
        Band::CAUSAL,
        Band::CAUSAL_TOP_LEFT,
        Band::window(3, 0),
        Band::window(3, 5),
        Band { corner: Corner::TopLeft, before: None, after: Some(4) },
    ]);
    p.score.softcap = draw.one_in(4).then_some(30.0);
    p.score.sink = draw.one_in(4);
    p.score.scale = draw.of(&[None, None, Some(0.5), Some(-0.5), Some(0.0)]);
    if draw.one_in(4) {
        p.lengths.q.packed = draw.one_in(2).then_some(100);
        p.lengths.kv.packed = draw.one_in(2).then_some(100);
        p.lengths.q.used = draw.one_in(2);
        p.lengths.kv.used = draw.one_in(2);
        p.lengths.left_padded = draw.one_in(3);
    }
    if p.lengths.kv.packed.is_none() && draw.one_in(4) {
        p = p.with_pages(draw.of(&[1, 3, 16, 64]), 7);
    }
    if dtype == DType::E4m3 && draw.one_in(2) {
        let layouts = [None, Some(64), Some(128)].map(|rows| ScaleLayout { rows, ..ScaleLayout::TENSOR });
        let scales = [0; 3].map(|_| draw.one_in(2).then(|| draw.of(&layouts)));
        p.scales = Scales { q: scales[0], k: scales[1], v: scales[2] };
    }
    if draw.one_in(4) {
        let dtype = draw.of(&[ElementType::F32, ElementType::F16]);
        let scores = [
            None,
            program(lib::alibi(0) * lib::float(0)),
            program(lib::relative_bias(1, lib::int(0))),
            program(lib::alibi(0) + lib::relative_bias(1, 20)),
        ];
        let masks = [
            None,
            program(lib::chunk(lib::int(1)) | lib::dilated(lib::int(0))),
            program(lib::chunk(3)),
            program(lib::causal() & lib::dilated(3)),
        ];
        p.programs = Programs {
            score: draw.of(&scores),
            mask: draw.of(&masks),
            floats: vec![1.0, 2.0],
            ints: vec![3, 5],
            tables: vec![Table::dense(dtype, &[2, 8]), Table::dense(dtype, &[8, 64])],
        };
    }
    retold(draw, &p)
}

/// The plan with another value of some genes, if the problem allows it.
fn mutated(draw: &mut Draw, plan: Plan, family: Family, p: &Problem, arch: &Arch) -> Plan {
    let genes: Vec<_> = family.genes(p).into_iter().filter(|gene| !gene.searched.is_empty()).collect();
    (0..6).fold(plan, |plan, _| {
        let gene = &genes[draw.below(genes.len())];
        let mut fields = serde_json::to_value(&plan).expect("a plan is JSON");
        fields[gene.name] = draw.of::<Value>(&gene.searched);
        let other: Option<Plan> = serde_json::from_value(fields).ok();
        other.filter(|other| other.check(p, arch).is_ok()).unwrap_or(plan)
    })
}

/// What the driver and a launch see of a program besides values: names and kinds of parameters and buffers,
/// and the boxes of tensor maps.
fn signature(contracts: &Contracts) -> String {
    let steps = contracts.steps.iter().map(|step| {
        let kinds: Vec<_> = step.args.iter().map(discriminant).collect();
        let boxes: Vec<_> =
            step.tensor_maps.iter().map(|map| (map.buffer, map.box_extents.clone(), map.swizzle)).collect();
        let taken: Vec<_> = step.takes.iter().map(|(buffer, _)| buffer).collect();
        format!("{} {kinds:?} {boxes:?} {taken:?} {:?}", step.entry, step.launch.cluster)
    });
    let kinds: Vec<_> = contracts.buffers.iter().map(|buffer| buffer.kind).collect();
    format!("{kinds:?} {:?}", steps.collect::<Vec<_>>())
}

struct Emitted {
    problem: Problem,
    baked: Baked,
    text: String,
    signature: String,
}

fn emitted(problem: Problem, plan: &Plan, arch: &Arch) -> Emitted {
    let program = emit(&problem, plan, arch).expect("the plan was checked");
    let (baked, contracts) = bind(&problem, plan, arch).expect("the plan was checked");
    assert_eq!(program.contracts, contracts);
    let text = program.module.to_string();
    Emitted { problem, baked, text, signature: signature(&contracts) }
}

/// What pairs of problems showed.
#[derive(Default)]
struct Found {
    /// Pairs with one text, and pairs with two.
    pairs: [usize; 2],
    /// Pairs that contradict [`Baked`].
    faults: Vec<String>,
}

/// Compares problems that differ in what a launch is told, or in other properties, for one plan.
fn found_in_draw(&(family, seed): &(Family, u64)) -> Found {
    let mut draw = Draw(0x9E37_79B9_7F4A_7C15 ^ (seed + 1).wrapping_mul(0xD134_2543_DE82_EF95));
    let archs = if family == Family::Mma { &Arch::ALL[..] } else { &[Arch::SM_90] };
    let (first, arch, plan) = loop {
        let (p, arch) = (problem(&mut draw), draw.of(archs));
        if let Ok(plan) = family.default_for(&p, &arch) {
            break (p, arch, plan);
        }
    };
    let plan = mutated(&mut draw, plan, family, &first, &arch);
    let mut all = vec![emitted(first, &plan, &arch)];
    for _ in 0..RETOLD {
        let (other, mixes) = (&all[0].problem, draw.one_in(3));
        let other = if mixes { mixed(&mut draw, other) } else { retold(&mut draw, other) };
        if other.check().is_ok() && plan.check(&other, &arch).is_ok() {
            all.push(emitted(other, &plan, &arch));
        }
    }
    let mut found = Found::default();
    for (i, a) in all.iter().enumerate() {
        for b in &all[..i] {
            let same = a.text == b.text;
            found.pairs[usize::from(!same)] += 1;
            if (a.baked == b.baked) != same || same && a.signature != b.signature {
                let text = if same { "one text" } else { "two texts" };
                let [ours, theirs] = [a, b].map(|of| format!("{:?}", of.baked));
                let what = format!("{text}\n{:?}\n{:?}\n{ours}\n{theirs}\n{plan:?}\n", a.problem, b.problem);
                found.faults.push(what);
            }
        }
    }
    found
}

#[test]
fn problems_have_one_text_where_they_have_one_key() {
    let draws: Vec<_> = Family::of_pass(PassKind::Forward)
        .flat_map(|family| (0..DRAWS).map(move |seed| (family, seed)))
        .collect();
    let found = each(&draws, found_in_draw);
    let faults: Vec<&str> = found.iter().flat_map(|found| &found.faults).map(String::as_str).collect();
    assert!(faults.is_empty(), "{} faults\n{}", faults.len(), faults.join("\n"));
    for (family, found) in Family::of_pass(PassKind::Forward).zip(found.chunks(DRAWS as usize)) {
        let [same, different] = [0, 1].map(|of| found.iter().map(|found| found.pairs[of]).sum::<usize>());
        assert!(same > 50 && different > 50, "{family:?}: {same} {different}");
    }
}
