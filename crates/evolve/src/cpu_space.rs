//! The genes of the native kernels' plans, and the values worth trying for a problem on this machine.

use cpu::{CpuPlan, Isa, Lanes, Order, Rows};
use kernels::Symptom;
use kernels::genes::{Cure, Turn};
use problem::Problem;
use serde_json::{Value, json};

use super::space::{Domain, FamilySpace, Gene, Space};
use ledger::Candidate;

impl Space {
    /// The space of this machine's native plans.
    pub fn cpu(problem: &Problem) -> Space {
        let template = Candidate::Cpu(CpuPlan::for_problem(problem));
        let family = FamilySpace::new("cpu", template, genes(problem), moves(problem));
        Space { domain: Domain::Cpu(problem.clone()), families: vec![family] }
    }
}

/// Each gene's values, without those that have no effect on the problem.
fn genes(problem: &Problem) -> Vec<Gene> {
    let p = problem;
    let threads = rayon::current_num_threads();
    let rows = p.seq_q * p.group_size();
    let up_to = |most: usize, values: &[usize]| -> Vec<Value> {
        // The first value that reaches the extent represents all larger ones.
        let last = values.iter().copied().find(|&value| value >= most);
        values.iter().copied().filter(|&value| value < most).chain(last).map(Value::from).collect()
    };
    let widest = isas(p).iter().map(|isa| isa.tile().0).max().unwrap_or(1);
    let mut genes = vec![
        ("isa", isas(p).into_iter().map(|isa| json!(isa)).collect()),
        ("threads", [1, threads.div_ceil(2), (3 * threads).div_ceil(4), threads].map(Value::from).to_vec()),
        (
            "block_q",
            up_to(rows, &[1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512, 1024, 2048]),
        ),
        ("block_kv", up_to(p.seq_kv, &[16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024])),
        ("lanes", vec![json!(Lanes::Queries), json!(Lanes::Dims)]),
        ("vectors", (1..=widest).map(Value::from).collect()),
        ("tile_rows", [1, 2, 4, 5, 6, 8, 12].map(Value::from).to_vec()),
        ("splits", up_to(p.seq_kv.div_ceil(64), &[1, 2, 3, 4, 6, 8, 16])),
    ];
    if p.group_size() > 1 {
        genes.push(("rows", vec![json!(Rows::Head), json!(Rows::Group)]));
    }
    if p.batch * p.heads_kv > 1 {
        genes.push(("order", vec![json!(Order::Longest), json!(Order::Heads)]));
    }
    genes.into_iter().map(|(name, values)| Gene { name, values, cures: cures(name) }).collect()
}

/// The findings that a change of the gene may cure.
fn cures(gene: &str) -> &'static [Cure] {
    match gene {
        "block_q" => &[(Symptom::RedundantLoads, Turn::Up)],
        "splits" => &[(Symptom::SmallGrid, Turn::Up)],
        "rows" => &[(Symptom::Dram, Turn::To("group"))],
        _ => &[],
    }
}

/// The vector instruction sets with a special method for the problem. Portable Rust is included only if there
/// are no others.
fn isas(problem: &Problem) -> Vec<Isa> {
    let mut isas = Isa::available();
    isas.retain(|isa| isa.is_for(problem));
    if isas.len() > 1 {
        isas.retain(|&isa| isa != Isa::Portable);
    }
    isas
}

/// Genes that are useful only in combination. The height of a register tile follows from its width and the
/// instruction set. Lanes along the head dimension suit few rows, small key blocks, and instruction sets that
/// support them.
fn moves(problem: &Problem) -> Vec<Value> {
    let isas = isas(problem);
    let tiles = isas.iter().flat_map(|isa| {
        (1..=isa.tile().0).map(
            move |vectors| json!({ "isa": isa, "vectors": vectors, "tile_rows": isa.tile_rows(vectors) }),
        )
    });
    let dims = isas.iter().find(|isa| isa.has_dims()).into_iter().flat_map(|isa| {
        let (widest, tallest) = isa.tile();
        [32, 64, 128].map(move |block_kv| {
            json!({ "isa": isa, "lanes": Lanes::Dims, "vectors": widest, "tile_rows": tallest, "block_kv": block_kv })
        })
    });
    tiles.chain(dims).collect()
}

#[cfg(test)]
mod tests {
    use problem::{DType, Layout};
    use rand::SeedableRng;
    use rand::rngs::SmallRng;

    use super::*;
    use crate::space::{genome, with_genes};

    #[test]
    fn every_draw_computes_the_problem_and_is_read_back() {
        let decode = Problem::new(1, 8, 1, 64, DType::Bf16)
            .with_seq_kv(500, Layout::Bhsd)
            .with_heads_kv(2, Layout::Bhsd);
        let mut rng = SmallRng::seed_from_u64(1);
        for problem in [Problem::mission(), decode, Problem::new(1, 1, 3, 7, DType::F32)] {
            let space = Space::cpu(&problem);
            assert!(space.fits(&space.families[0].template) && space.upper_bound() > 50.0);
            for _ in 0..50 {
                let drawn = space.random(&mut rng).unwrap();
                let varied = space.mutate(&drawn, &mut rng).unwrap();
                for plan in [&drawn, &varied] {
                    assert!(space.fits(plan), "{plan:?}");
                    assert_eq!(with_genes(&space.families[0].template, &genome(plan)).as_ref(), Some(plan));
                }
            }
            // Every gene is a field of the plan.
            let plan = genome(&space.families[0].template);
            assert!(space.families[0].genes.iter().all(|gene| plan.contains_key(gene.name)));
        }
    }

    #[test]
    fn plans_written_before_there_were_these_genes_are_read() {
        let isa = Isa::best();
        let old = json!({ "isa": isa, "threads": 2, "block_q": 256, "block_kv": 128 });
        assert_eq!(
            serde_json::from_value::<CpuPlan>(old.clone()).unwrap(),
            CpuPlan::widest(isa, 2, 256, 128)
        );
        let mut newer = old;
        newer["prefetch"] = json!(3);
        assert!(serde_json::from_value::<CpuPlan>(newer).unwrap_err().to_string().contains("prefetch"));
    }
}
