//! Tests that every gene has an effect, and that every value computes the right result. Each family has a
//! table of single changes to a plan. A gene or variant that is missing from its table fails here.

mod backward;
mod decode;
mod mma;
mod small;
mod wgmma;

use crate::backward::reference::{Inputs, even};
use crate::common;
use crate::common::small_plan;
use crate::tools::{self, Facts};
use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::common::each::each;
use emu::{Emulator, Options, Schedule};
use flashcore_kernels::forward::wgmma::{Rescaling, WgmmaPlan};
use flashcore_kernels::{Arch, Family, Plan, emit};
use problem::program::library;
use problem::{Band, DType, ElementType, Layout, PassKind, Problem, Program, Table};
use ptx::Kernel;
use serde_json::Value;

/// A line of a family's table: the problem on which the value has an effect, the other genes that the value
/// requires, and the value.
type Line<P> = (fn() -> Problem, fn(&mut P), fn(&mut P));

/// One gene set to another value.
struct Change {
    gene: String,
    problem: Problem,
    arch: Arch,
    base: Plan,
    plan: Plan,
}

impl Change {
    fn kernels(&self) -> [(&Plan, Kernel); 2] {
        [&self.base, &self.plan].map(|plan| {
            let kernel = emit(&self.problem, plan, &self.arch).map(|step| step.kernel(0));
            (plan, kernel.unwrap_or_else(|e| panic!("{plan:?}: {e}")))
        })
    }

    /// The part of a kernel that the gene determines.
    fn effect(&self, kernel: &Kernel) -> String {
        let is_one_of = |genes: &[&str]| genes.contains(&self.gene.as_str());
        let args = if is_one_of(&ARGUMENTS) { &kernel.args[..] } else { &[] };
        let grid = is_one_of(&GRIDS).then_some(kernel.launch.grid);
        format!("{}{args:?}{grid:?}", kernel.module)
    }
}

/// Genes that only change an argument of a kernel.
const ARGUMENTS: [&str; 1] = ["section_mib"];
/// Genes with a value that only changes the grid.
const GRIDS: [&str; 1] = ["handout"];

fn changes(family: Family) -> Vec<Change> {
    match family {
        Family::Mma => of_table(mma::TABLE, mma::plain, Plan::Mma, Arch::SM_89),
        Family::Decode => of_table(decode::TABLE, decode::plain, Plan::Decode, Arch::SM_80),
        Family::Wgmma => of_table(wgmma::TABLE, || WgmmaPlan::PLAIN, Plan::Wgmma, Arch::SM_90),
        Family::BackwardSplit => of_table(backward::TABLE, backward::plain, Plan::BackwardSplit, Arch::SM_89),
        Family::SmallAtOnce => of_table(small::AT_ONCE, small_plan::at_once, Plan::SmallAtOnce, Arch::SM_90),
        Family::SmallStreamed => {
            of_table(small::STREAMED, small_plan::streamed, Plan::SmallStreamed, Arch::SM_90)
        }
    }
}

fn of_table<P: Clone>(table: &[Line<P>], plain: fn() -> P, of: fn(P) -> Plan, arch: Arch) -> Vec<Change> {
    // There are so few SMs that a persistent CTA computes several tiles.
    let arch = Arch { multiprocessors: 2, ..arch };
    let change = |&(problem, beside, value): &Line<P>| {
        let mut base = plain();
        beside(&mut base);
        let mut plan = base.clone();
        value(&mut plan);
        let (base, plan) = (of(base), of(plan));
        let (before, after) = (json(&base), json(&plan));
        let changed: Vec<&String> = before.keys().filter(|gene| before[*gene] != after[*gene]).collect();
        let [gene] = changed[..] else { panic!("{changed:?} of {plan:?} change, and one gene should") };
        Change { gene: gene.clone(), problem: problem(), arch, base, plan }
    };
    table.iter().map(change).collect()
}

fn json(plan: &Plan) -> serde_json::Map<String, Value> {
    let Ok(Value::Object(genes)) = serde_json::to_value(plan) else { panic!("{plan:?} is no object") };
    genes
}

/// Three heads with ragged ends, with the LSE.
fn rectangle(mask: Band) -> Problem {
    let problem = Problem::new(1, 3, 150, 64, DType::Bf16).with_band(mask);
    problem.with_seq_kv(170, Layout::Bshd).with_lse(true)
}

fn capped() -> Problem {
    rectangle(Band::CAUSAL).with_softcap(3.0)
}

/// A mask of chunks, in which some blocks are empty, some full and some partial.
fn masked() -> Problem {
    let mut problem = rectangle(Band::FULL);
    problem.programs.mask = Some(Program::new(&library::block_diagonal(80)).unwrap());
    problem
}

/// A bias for each score, whose rows are aligned to 16 bytes.
fn biased() -> Problem {
    let mut problem = rectangle(Band::CAUSAL);
    let (extents, strides) = (vec![1, 3, 150, 170], vec![0, 150 * 176, 176, 1]);
    problem.programs.tables = vec![Table { dtype: ElementType::Bf16, extents, strides }];
    problem.programs.score = Some(Program::new(&library::bias(0)).unwrap());
    problem
}

fn full() -> Problem {
    rectangle(Band::FULL)
}

fn causal() -> Problem {
    rectangle(Band::CAUSAL)
}

/// Inputs of 8 bits.
fn small_types() -> Problem {
    rectangle(Band::FULL).with_dtypes(DType::E4m3.into())
}

/// Collects the values of a plan's genes, and of the fields of their variants, by path.
fn collect(place: &str, value: &Value, values: &mut BTreeMap<String, BTreeSet<String>>) {
    let mut note = |value: &str| {
        values.entry(place.to_owned()).or_default().insert(value.to_owned());
    };
    match value {
        Value::Object(inner) => {
            if !place.contains('.') {
                inner.keys().for_each(|variant| note(variant));
            }
            inner.iter().for_each(|(name, value)| collect(&format!("{place}.{name}"), value, values));
        }
        Value::String(name) => note(name),
        other => note(&other.to_string()),
    }
}

/// Names of variants that occur in stored rows; current plans are not written with them.
const FORMER: [&str; 3] = ["classic", "lazy", "optimistic"];

/// The variants that serde accepts for a gene; none for a number.
fn variants(plan: &Plan, gene: &str) -> Vec<String> {
    let mut genes = json(plan);
    genes[gene] = "?".into();
    let error = serde_json::from_value::<Plan>(genes.into()).expect_err("nothing is named so").to_string();
    let accepted = error.split_once("unknown variant `?`, expected ").map_or("", |(_, accepted)| accepted);
    let names = accepted.split('`').skip(1).step_by(2).filter(|name| !FORMER.contains(name));
    names.map(str::to_owned).collect()
}

#[test]
fn every_gene_and_every_variant_is_in_its_table() {
    for family in Family::ALL {
        let changes = changes(family);
        let changed: BTreeSet<&String> = changes.iter().map(|change| &change.gene).collect();
        let mut values = BTreeMap::new();
        for plan in changes.iter().flat_map(|change| [&change.base, &change.plan]) {
            json(plan).iter().for_each(|(gene, value)| collect(gene, value, &mut values));
        }
        let plan = &changes[0].base;
        let genes: Vec<String> =
            json(plan).into_iter().map(|(gene, _)| gene).filter(|g| g != "family").collect();
        let mut named = 0;
        for gene in &genes {
            assert!(changed.contains(gene), "{}: no line changes {gene}", family.name());
            for variant in variants(plan, gene) {
                assert!(values[gene].contains(&variant), "{}: no line has {gene} = {variant}", family.name());
                named += 1;
            }
        }
        assert!(named > 7, "{}: {named} variants are few; serde says it in other words?", family.name());
        for (place, values) in values.iter().filter(|(place, _)| *place != "family") {
            assert!(values.len() > 1, "{}: {place} is {values:?} in every line", family.name());
        }
    }
}

/// Each field of a plan is declared once, and serde reads each of its values.
#[test]
fn every_gene_is_declared() {
    for family in Family::ALL {
        let plan = &changes(family)[0].base;
        let fields: Vec<String> = json(plan).into_iter().map(|(name, _)| name).collect();
        let grouped = full().with_heads_kv(1, Layout::Bshd);
        for problem in [full(), causal(), masked(), biased(), grouped] {
            let genes = family.genes(&problem);
            let mut declared: Vec<&str> = genes.iter().map(|gene| gene.name).chain(["family"]).collect();
            declared.sort_unstable();
            let mut fields = fields.clone();
            fields.sort_unstable();
            assert_eq!(declared, fields, "{}", family.name());
            for (gene, value) in genes
                .iter()
                .flat_map(|gene| gene.searched.iter().chain(&gene.wider).map(move |value| (gene.name, value)))
            {
                let mut genes = json(plan);
                genes[gene] = value.clone();
                let read: Plan = serde_json::from_value(genes.into())
                    .unwrap_or_else(|error| panic!("{}: {gene} {value}: {error}", family.name()));
                assert_eq!(json(&read)[gene], *value);
            }
        }
    }
}

/// A gene without effect is dead: no two plans may give the same kernel.
#[test]
fn every_gene_changes_the_kernel() {
    for family in Family::ALL {
        let mut plans: HashMap<_, Plan> = HashMap::new();
        for change in changes(family) {
            for (plan, kernel) in change.kernels() {
                let effect = (format!("{:?}", change.problem), change.effect(&kernel));
                let same = plans.entry(effect).or_insert_with(|| plan.clone());
                assert_eq!(same, plan, "one kernel for two plans");
            }
        }
    }
}

/// Rows of tables, evidence and ledgers that use the former names of genes can be read.
#[test]
fn former_names_are_read() {
    let read = |plan: &Plan, former: &[(&str, &str, Value)]| {
        let mut genes = json(plan);
        for (now, then, value) in former {
            genes.remove(*now).unwrap_or_else(|| panic!("{now} is a gene"));
            genes.insert((*then).to_owned(), value.clone());
        }
        serde_json::from_value::<Plan>(genes.into()).unwrap()
    };
    let plan = Plan::Mma(mma::plain());
    assert_eq!(
        read(&plan, &[("products", "order", "in_turn".into()), ("tile_order", "grid", "rows_first".into())]),
        plan
    );
    let plan = Plan::SmallStreamed(small_plan::streamed());
    let former = [("tile_order", "order", "by_head".into()), ("speculative", "guess", Value::Null)];
    assert_eq!(read(&plan, &former), plan);
    former_small_plans_are_read();
    for (rescale, former) in [
        (Rescaling::Always, serde_json::json!("classic")),
        (Rescaling::Beyond(8), serde_json::json!({ "lazy": { "slack": 8 } })),
        (
            Rescaling::Speculative { beyond: 8, limit: 15 },
            serde_json::json!({ "optimistic": { "slack": 8, "limit": 15 } }),
        ),
    ] {
        let plan = Plan::Wgmma(WgmmaPlan { rescale, ..WgmmaPlan::PLAIN });
        let former = [
            ("rescale", "softmax", former),
            ("resident_ctas", "resident", 1.into()),
            ("tile_order", "order", "in_order".into()),
        ];
        assert_eq!(read(&plan, &former), plan);
    }
}

/// Plans of the former family `small` had the genes of both families. Those with one stage held all keys at
/// once.
fn former_small_plans_are_read() {
    let [at_once, streamed] =
        [Plan::SmallAtOnce(small_plan::at_once()), Plan::SmallStreamed(small_plan::streamed())];
    let (of_at_once, of_streamed) = (json(&at_once), json(&streamed));
    let former = |first: &serde_json::Map<String, Value>, others: &serde_json::Map<String, Value>| {
        let mut genes = others.clone();
        genes.extend(first.clone());
        genes.insert("family".to_owned(), "small".into());
        genes
    };
    assert_eq!(serde_json::from_value::<Plan>(former(&of_streamed, &of_at_once).into()).unwrap(), streamed);
    let mut one_stage = former(&of_at_once, &of_streamed);
    one_stage.insert("stages".to_owned(), 1.into());
    assert_eq!(serde_json::from_value::<Plan>(one_stage.clone().into()).unwrap(), at_once);
    one_stage.remove("key_copies");
    let error = serde_json::from_value::<Plan>(one_stage.into()).unwrap_err().to_string();
    assert_eq!(error, "missing field `key_copies`");
}

#[test]
fn plans_survive_serde() {
    for family in Family::ALL {
        for Change { plan, .. } in changes(family) {
            let text = serde_json::to_string(&plan).unwrap();
            assert!(text.starts_with(&format!(r#"{{"family":"{}""#, family.name())), "{text}");
            assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan, "{text}");
        }
    }
}

/// The machine code or the launch of the two kernels also differs, and neither kernel spills.
#[test]
fn every_gene_changes_what_runs() {
    let changes: Vec<Change> = Family::ALL.into_iter().flat_map(changes).collect();
    let kernels: Vec<_> = changes.iter().map(Change::kernels).collect();
    let of_plans: Vec<&Kernel> = kernels.iter().flatten().map(|(_, kernel)| kernel).collect();
    let Some(facts) = tools::facts(&of_plans) else { return };
    for ((plan, _), facts) in kernels.iter().flatten().zip(&facts) {
        assert_eq!(facts.spills, 0, "{plan:?}: {} registers", facts.registers);
    }
    let runs = |kernel: &Kernel, facts: &Facts| {
        (facts.code.clone(), facts.registers, kernel.launch, kernel.args.clone())
    };
    for ((change, [(_, base), (_, plan)]), facts) in changes.iter().zip(&kernels).zip(facts.chunks(2)) {
        let differs = runs(base, &facts[0]) != runs(plan, &facts[1]);
        assert!(differs, "{} of {:?} changes nothing that runs", change.gene, change.plan);
    }
}

/// Runs a plan of either pass and checks the results.
fn check(problem: &Problem, plan: &Plan, arch: &Arch, options: Options) {
    let (seed, mut machine) = (options.seed, Emulator::new(options));
    if plan.pass() == PassKind::Forward {
        return common::run(&mut machine, problem, plan, arch, seed).check();
    }
    let inputs = Inputs::draw(problem, even(), seed);
    let gradients = inputs.run(&mut machine, plan, arch);
    assert_eq!(inputs.fault(&gradients), None, "{problem:?}\n{plan:?}");
}

/// A top-left diagonal that ends within the rows: later rows see all keys, earlier rows do not.
#[test]
fn rows_beyond_a_top_left_diagonal_see_all_keys() {
    let changes: Vec<_> = Family::ALL.into_iter().flat_map(changes).enumerate().collect();
    let causal: Vec<_> = changes.into_iter().filter(|(_, change)| change.problem.band.is_causal()).collect();
    each(&causal, |(i, Change { problem, arch, plan, .. })| {
        let keys = 2 * problem.seq_q / 3;
        let problem = problem.clone().with_band(Band::CAUSAL_TOP_LEFT).with_seq_kv(keys, Layout::Bshd);
        let options = Options { seed: *i as u64, ..Options::default() };
        check(&problem, plan, arch, options);
    });
}

#[test]
fn every_value_is_right_without_hazards() {
    let schedules = [Schedule::Late, Schedule::Early, Schedule::Random];
    let changes: Vec<_> = Family::ALL.into_iter().flat_map(changes).enumerate().collect();
    each(&changes, |(i, Change { problem, arch, plan, .. })| {
        let options = Options { seed: *i as u64, schedule: schedules[i % 3], ..Options::default() };
        check(problem, plan, arch, options);
    });
}
