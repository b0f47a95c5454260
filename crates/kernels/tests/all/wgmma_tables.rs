//! Tests of `wgmma` with tables that the score program reads from shared memory: results and hazards in the
//! emulator with random genes, the properties on which the text depends, the reads that are refused, and the
//! machine code of the default plans.

use crate::common::wgmma_plan::{self, check};
use crate::tools;
use attend::Packing;
use emu::{Options, Schedule};
use flashcore_kernels::forward::wgmma::{Ends, Rescaling, Tables, WgmmaPlan};
use flashcore_kernels::{Arch, Plan, PlanError, emit};
use problem::program::library as lib;
use problem::{Band, DType, ElementType, Expr, Layout, Problem, Program, Table};

const SPECULATIVE: Rescaling = Rescaling::Speculative { beyond: 0, limit: 3 };

/// The problem with a bias of bf16 that repeats along the given dimensions, batch and head. Rows are aligned,
/// with a gap between them.
fn biased(problem: Problem, repeats: [bool; 2]) -> Problem {
    let table = bias_table(&problem, repeats, 8);
    with_score(problem, vec![table], lib::bias(0))
}

/// A table of bf16 `[batch, head, query, key]` whose rows have gaps, up to a multiple of `unit` elements.
fn bias_table(problem: &Problem, repeats: [bool; 2], unit: usize) -> Table {
    let Problem { batch, heads_q, seq_q, seq_kv, .. } = *problem;
    let row = (seq_kv + 1).next_multiple_of(unit);
    let [of_batch, of_head] = [heads_q * seq_q * row, seq_q * row];
    let strides = [(of_batch, repeats[0]), (of_head, repeats[1]), (row, false), (1, false)];
    Table {
        dtype: ElementType::Bf16,
        extents: vec![batch, heads_q, seq_q, seq_kv],
        strides: strides.map(|(stride, repeats)| if repeats { 0 } else { stride as i64 }).to_vec(),
    }
}

fn with_score(mut problem: Problem, tables: Vec<Table>, score: Expr) -> Problem {
    problem.programs.tables = tables;
    problem.programs.score = Some(Program::new(&score).unwrap());
    problem
}

fn sharing(plan: WgmmaPlan) -> WgmmaPlan {
    WgmmaPlan { tables: Tables::Shared, ..plan }
}

/// The reason for which a plan is refused.
fn refusal(problem: &Problem, plan: &WgmmaPlan) -> String {
    Plan::Wgmma(plan.clone()).check(problem, &Arch::SM_90).expect_err("refused").to_string()
}

/// Random combinations of genes and problems: ragged lengths, groups of heads, a bias that repeats along the
/// batch or the heads.
#[test]
fn genes_get_along_with_tables_in_shared_memory() {
    wgmma_plan::genes_get_along(|draw, plan| {
        let (seq_q, seq_kv) = (1 + draw.below(300), 1 + draw.below(300));
        let problem = Problem::new(draw.of(&[1, 2]), 2, seq_q, draw.of(&[64, 128]), DType::Bf16)
            .with_band(draw.of(&Band::NAMED))
            .with_seq_kv(seq_kv, Layout::Bshd)
            .with_heads_kv(draw.of(&[1, 2]), Layout::Bshd);
        let rescale = draw.of(&[SPECULATIVE, plan.rescale]);
        let block_n = draw.of(&[16, 32, 48, 96]);
        let plan = WgmmaPlan { packing: Packing::Apart, block_n, rescale, ..sharing(plan) };
        (biased(problem, [draw.one_in(2), draw.one_in(2)]), plan)
    });
}

/// Two biases in tiles, a bias in tiles beside one whose rows are not aligned, and indices of the head and
/// the batch entry that are computed.
#[test]
fn several_reads_are_right() {
    let problem = || {
        Problem::new(2, 4, 150, 64, DType::Bf16)
            .with_band(Band::CAUSAL)
            .with_seq_kv(170, Layout::Bshd)
            .with_heads_kv(2, Layout::Bshd)
    };
    let of = |table: u32| lib::bias(table) - lib::score();
    let [aligned, repeated, odd] = [([false; 2], 8), ([true, true], 8), ([false; 2], 9)]
        .map(|(repeats, unit)| bias_table(&problem(), repeats, unit));
    let computed =
        Expr::load(0, true, [lib::batch() / 2, (lib::head() - 1).max(0), lib::query(), lib::key()]);
    let matrix = Table { extents: vec![150, 170], strides: vec![176, 1], ..aligned.clone() };
    for (i, (tables, score)) in [
        (vec![aligned.clone(), repeated.clone()], lib::bias(0) + of(1)),
        (vec![odd, aligned.clone()], lib::bias(0) + of(1)),
        (vec![aligned], lib::score() + computed),
        (vec![matrix], lib::score() + Expr::load(0, true, [lib::query(), lib::key()])),
    ]
    .into_iter()
    .enumerate()
    {
        let problem = with_score(problem(), tables, score);
        let rescale = [SPECULATIVE, Rescaling::Beyond(8)][i % 2];
        let plan = sharing(WgmmaPlan { consumers: 2, rescale, ends: Ends::Own, ..WgmmaPlan::PLAIN });
        let schedule = [Schedule::Late, Schedule::Early, Schedule::Random][i % 3];
        check(&problem, plan, Options { seed: i as u64, schedule, ..Options::default() });
    }
}

/// Strides and extents are launch parameters: one text serves tables with and without repeated dimensions.
#[test]
fn the_text_does_not_depend_on_strides() {
    let problem = |batch, keys| Problem::new(batch, 4, 300, 64, DType::Bf16).with_seq_kv(keys, Layout::Bshd);
    let text = |problem: &Problem| {
        let plan = Plan::Wgmma(sharing(WgmmaPlan { consumers: 2, ..WgmmaPlan::PLAIN }));
        emit(problem, &plan, &Arch::SM_90).unwrap().module.to_string()
    };
    let [one, other] = [(1, 333, [false, false]), (3, 555, [true, true])]
        .map(|(b, keys, repeats)| biased(problem(b, keys), repeats));
    assert_eq!(text(&one), text(&other));
    assert!(text(&one).contains("ldmatrix") && !text(&one).contains("ld.global.nc.v4"));
    let kernel = |problem: &Problem| {
        let plan = Plan::Wgmma(sharing(WgmmaPlan { consumers: 2, ..WgmmaPlan::PLAIN }));
        emit(problem, &plan, &Arch::SM_90).unwrap().kernel(0)
    };
    let map = kernel(&other).tensor_maps.last().unwrap().clone();
    assert_eq!((map.extents, map.strides), (vec![555, 300, 1, 1], vec![2 * 560, 16, 16]));
    let map = kernel(&one).tensor_maps.last().unwrap().clone();
    assert_eq!((map.extents, map.strides), (vec![333, 300, 4, 1], vec![2 * 336, 2 * 336 * 300, 16]));
    map_is_in_its_table(&kernel(&one));
}

fn map_is_in_its_table(kernel: &ptx::Kernel) {
    let map = kernel.tensor_maps.last().unwrap();
    assert_eq!(kernel.buffers[map.buffer].name, "table_0");
    map.check_in(&kernel.buffers).unwrap();
}

#[test]
fn tables_that_tiles_cannot_hold_are_refused_with_the_reason() {
    let base = || Problem::new(2, 4, 300, 64, DType::Bf16).with_layout(Layout::Bshd);
    let plan = sharing(WgmmaPlan::PLAIN);
    let of_table = |change: &dyn Fn(&mut Table)| {
        let mut problem = biased(base(), [false; 2]);
        change(&mut problem.programs.tables[0]);
        refusal(&problem, &plan)
    };
    let strides = |dimension: usize, stride: i64| of_table(&|table| table.strides[dimension] = stride);
    assert_eq!(
        strides(2, 301),
        "invalid value '301' for stride 2 of table_0 with family wgmma: expected multiples of 8 from 8 to \
         2^39 elements, as tensor maps need with tables = shared"
    );
    assert!(strides(2, 0).starts_with("invalid value '0' for stride 2 of table_0"));
    assert!(strides(1, 91_204).starts_with("invalid value '91204' for stride 1 of table_0"));
    assert!(strides(0, 1 << 39).starts_with("invalid value '549755813888' for stride 0 of table_0"));
    assert!(strides(3, 2).starts_with("invalid value '2' for stride 3 of table_0"));
    assert_eq!(
        of_table(&|table| table.dtype = ElementType::F32),
        "invalid value 'f32' for type of table_0 with family wgmma: expected f16 and bf16 with tables = shared"
    );
    let packed = WgmmaPlan { packing: Packing::Packed, consumers: 2, ..plan.clone() };
    assert_eq!(
        refusal(&biased(base().with_heads_kv(2, Layout::Bshd), [false; 2]), &packed),
        "invalid value 'packed' for packing with family wgmma: expected apart with tables = shared"
    );
    let no_read = "invalid value 'no such read' for score program with family wgmma: expected one that reads a table \
                   at the query and the key with tables = shared";
    assert_eq!(refusal(&base(), &plan), no_read);
    let table = bias_table(&base(), [false; 2], 8);
    let shifted = Expr::load(0, true, [lib::batch(), lib::head(), lib::query(), (lib::key() + 1).min(299)]);
    assert_eq!(refusal(&with_score(base(), vec![table], lib::score() + shifted), &plan), no_read);
    let large = biased(base(), [false; 2]);
    let error = Plan::Wgmma(WgmmaPlan { consumers: 3, block_n: 256, stages: 2, ..plan });
    assert!(matches!(error.check(&large, &Arch::SM_90), Err(PlanError::SharedMemory { .. })));
}

/// Problems like those of vision models: a bias for each head and score.
fn of_models() -> impl Iterator<Item = Problem> {
    let dims =
        [(64, DType::Bf16), (64, DType::F16), (80, DType::Bf16), (128, DType::F16), (256, DType::Bf16)];
    let problem = |((dim, dtype), band): ((usize, DType), Band)| {
        let problem = Problem::new(1, 16, 4096, dim, dtype).with_layout(Layout::Bshd).with_band(band);
        let dtype = if dtype == DType::F16 { ElementType::F16 } else { ElementType::Bf16 };
        with_score(problem, vec![Table::dense(dtype, &[1, 16, 4096, 4096])], lib::bias(0))
    };
    dims.into_iter().flat_map(|of| [Band::FULL, Band::CAUSAL].map(|band| (of, band))).map(problem)
}

/// Default plans read a bias from shared memory. A bias that tensor maps cannot describe is read from global
/// memory.
#[test]
fn default_plans_read_a_bias_from_shared_memory() {
    for mut problem in of_models() {
        let plan = WgmmaPlan::default_for(&problem, &Arch::SM_90);
        assert_eq!(plan.tables, Tables::Shared, "{plan:?}");
        Plan::Wgmma(plan).check(&problem, &Arch::SM_90).unwrap();
        problem.programs.tables[0].strides[2] = 4100;
        let plan = WgmmaPlan::default_for(&problem, &Arch::SM_90);
        assert_eq!(plan.tables, Tables::Registers, "{plan:?}");
        Plan::Wgmma(plan).check(&problem, &Arch::SM_90).unwrap();
    }
}

/// The elements of a bias cost few instructions, and ptxas leaves exponentials between the wait for the
/// scores and the wait for P V. If the elements were read after the products were issued, ptxas would join
/// the two waits, because it schedules the second one where other instructions wait for the elements.
#[test]
fn machine_code_overlaps_products_with_the_softmax() {
    let (Some(ptxas), Some(nvdisasm)) = (tools::find("FLASHCORE_PTXAS"), tools::find("FLASHCORE_NVDISASM"))
    else {
        return;
    };
    for problem in of_models() {
        let plan = WgmmaPlan::default_for(&problem, &Arch::SM_90);
        let kernel = emit(&problem, &Plan::Wgmma(plan.clone()), &Arch::SM_90).unwrap().kernel(0);
        let assembled = tools::assemble(&ptxas, &kernel);
        assert_eq!(assembled.spills, 0, "{plan:?}");
        let sass = tools::disassemble(&nvdisasm, &assembled);
        let waits = ["WARPGROUP.DEPBAR.LE gsb0, 0x1", "WARPGROUP.DEPBAR.LE gsb0, 0x0"];
        // Two copies of the loop under a causal mask, then at most one for the end of a tile.
        let copies = if problem.band.is_full() { 1 } else { 2 };
        let mut rest = &sass[..];
        for _ in 0..copies {
            let scores = rest.find(waits[0]).unwrap_or_else(|| panic!("{plan:?}: no wait for scores"));
            rest = &rest[scores + waits[0].len()..];
            let output = rest.find(waits[1]).unwrap_or_else(|| panic!("{plan:?}: no wait for P V"));
            assert!(rest[..output].contains("MUFU.EX2"), "{plan:?}: the waits are joined");
        }
        // One for each 16 columns, in the first block and in each copy of the loop.
        let reads = sass.matches("LDSM").count();
        assert_eq!(reads, (copies + 1) * (plan.block_n / 16) as usize, "{plan:?}");
    }
}
