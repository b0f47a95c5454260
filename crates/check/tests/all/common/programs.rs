//! Features of scores and masks, and problems that combine them, for tests.

use problem::program::library as lib;
use problem::{Band, Corner, ElementType, Expr, Problem, Program, Table};

/// A feature of a problem.
pub struct Feature {
    pub name: &'static str,
    add: fn(&mut Draft),
}

/// A problem under construction.
pub struct Draft {
    problem: Problem,
    score: Option<Expr>,
    mask: Option<Expr>,
}

impl Draft {
    /// Adds a table; returns its number.
    fn table(&mut self, table: Table) -> u32 {
        self.problem.programs.tables.push(table);
        self.problem.programs.tables.len() as u32 - 1
    }

    fn int(&mut self, value: i32) -> Expr {
        self.problem.programs.ints.push(value);
        lib::int(self.problem.programs.ints.len() as u32 - 1)
    }

    /// Adds the term that a program adds to the score.
    fn score(&mut self, program: Expr) {
        self.score = Some(match self.score.take() {
            None => program,
            Some(other) => other + (program - lib::score()),
        });
    }

    fn mask(&mut self, program: Expr) {
        self.mask = Some(match self.mask.take() {
            None => program,
            Some(other) => other & program,
        });
    }

    /// A table `[batch, head, query, key]`: with all dimensions, or with one for all batch entries and heads.
    fn tensor(&mut self, dtype: ElementType, broadcast: bool) -> u32 {
        let Problem { batch, heads_q, seq_q, seq_kv, .. } = self.problem;
        let mut table = Table::dense(dtype, &[batch, heads_q, seq_q, seq_kv]);
        if broadcast {
            table.strides[..2].fill(0);
            table.strides[2] = seq_kv as i64 + 3;
        }
        self.table(table)
    }
}

/// The problem with the features.
pub fn draft(problem: Problem, features: &[&Feature]) -> Problem {
    let mut draft = Draft { problem, score: None, mask: None };
    features.iter().for_each(|feature| (feature.add)(&mut draft));
    let Draft { mut problem, score, mask } = draft;
    let program = |expr: Expr| Program::new(&expr).expect("the features are typed");
    (problem.programs.score, problem.programs.mask) = (score.map(program), mask.map(program));
    problem
}

/// Every feature.
pub const FEATURES: [Feature; 16] = [
    Feature { name: "causal", add: |d| d.problem.band = Band::CAUSAL },
    Feature { name: "window", add: |d| d.problem.band = Band::window(20, 5).aligned(Corner::TopLeft) },
    Feature { name: "softcap", add: |d| d.problem.score.softcap = Some(2.0) },
    Feature { name: "sink", add: |d| d.problem.score.sink = true },
    Feature {
        name: "alibi",
        add: |d| {
            let extents = [d.problem.batch, d.problem.heads_q];
            let mut table = Table::dense(ElementType::F32, &extents);
            table.strides[0] = 0;
            let table = d.table(table);
            d.score(lib::alibi(table));
        },
    },
    Feature {
        name: "bias",
        add: |d| {
            let table = d.tensor(ElementType::Bf16, false);
            d.score(lib::bias(table));
        },
    },
    Feature {
        name: "broadcast bias",
        add: |d| {
            let table = d.tensor(ElementType::F32, true);
            d.score(lib::bias(table));
        },
    },
    Feature {
        name: "relative bias",
        add: |d| {
            let table = d.table(Table::dense(ElementType::F16, &[d.problem.heads_q, 50]));
            let offset = d.int(25);
            d.score(lib::relative_bias(table, offset));
        },
    },
    Feature {
        name: "t5",
        add: |d| {
            let table = d.table(Table::dense(ElementType::F32, &[d.problem.heads_q, 16]));
            d.score(lib::t5_bias(table, 16, 64, true));
        },
    },
    Feature {
        name: "mask",
        add: |d| {
            let table = d.tensor(ElementType::U8, true);
            d.mask(lib::mask_tensor(table));
        },
    },
    Feature {
        name: "document",
        add: |d| {
            let positions = d.problem.seq_q.max(d.problem.seq_kv);
            let table = d.table(Table::dense(ElementType::I32, &[d.problem.batch, positions]));
            d.mask(lib::document(table));
        },
    },
    Feature {
        name: "prefix",
        add: |d| {
            let length = d.int(11);
            d.mask(lib::prefix(length));
        },
    },
    Feature {
        name: "chunk",
        add: |d| {
            let length = d.int(13);
            d.mask(lib::chunk(length));
        },
    },
    Feature {
        name: "tree",
        add: |d| {
            let table = d.table(Table::dense(ElementType::I32, &[d.problem.seq_q]));
            d.mask(lib::tree(table));
        },
    },
    Feature {
        name: "dilated",
        add: |d| {
            let step = d.int(3);
            d.mask(lib::dilated(step));
        },
    },
    Feature { name: "block diagonal", add: |d| d.mask(lib::block_diagonal(24)) },
];
