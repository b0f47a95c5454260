//! The shape of a dense problem, the key of the tables of tuned plans.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Band, DTypes, Layout, Pass, PassKind, Problem};

/// The properties of a problem that decide which plan is fast: everything except strides and scale. The
/// tables of tuned plans and the search use the shape as a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// Batch entries.
    pub batch: usize,
    /// Query heads.
    pub heads_q: usize,
    /// Heads of K and V.
    pub heads_kv: usize,
    /// Query positions.
    pub seq_q: usize,
    /// Key positions.
    pub seq_kv: usize,
    /// Elements of a query or key row.
    pub head_dim: usize,
    /// Elements of a value row.
    pub head_dim_v: usize,
    /// Element types. In files the field is called `dtype`.
    #[serde(rename = "dtype")]
    pub dtypes: DTypes,
    /// Which keys a query sees.
    pub mask: Band,
    /// The direction of the pass.
    #[serde(default, skip_serializing_if = "PassKind::is_forward")]
    pub pass: PassKind,
    /// Whether a backward pass must return equal bits in every run.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub deterministic: bool,
}

impl Shape {
    /// The shape of a problem.
    pub const fn of(problem: &Problem) -> Shape {
        Shape {
            batch: problem.batch,
            heads_q: problem.heads_q,
            heads_kv: problem.heads_kv,
            seq_q: problem.seq_q,
            seq_kv: problem.seq_kv,
            head_dim: problem.head_dim,
            head_dim_v: problem.head_dim_v,
            dtypes: problem.dtypes,
            mask: problem.band,
            pass: problem.pass.kind(),
            deterministic: problem.pass.deterministic(),
        }
    }

    /// A problem of this shape with dense strides.
    pub fn problem(&self) -> Problem {
        let problem = Problem {
            heads_kv: self.heads_kv,
            seq_kv: self.seq_kv,
            head_dim_v: self.head_dim_v,
            band: self.mask,
            pass: match self.pass {
                PassKind::Forward => Pass::default(),
                PassKind::Backward if self.deterministic => Pass::DETERMINISTIC,
                PassKind::Backward => Pass::BACKWARD,
            },
            ..Problem::new(self.batch, self.heads_q, self.seq_q, self.head_dim, self.dtypes)
        };
        problem.with_layout(Layout::Bhsd)
    }

    /// The shape as a title: `bf16 B4 H32/8 S1×8192 D128 causal`.
    pub fn title(&self) -> String {
        let heads = pair(self.heads_q, self.heads_kv, '/');
        let seq = pair(self.seq_q, self.seq_kv, '×');
        let dim = pair(self.head_dim, self.head_dim_v, '/');
        let mask = if self.mask == Band::FULL { String::new() } else { format!(" {}", self.mask) };
        format!("{} B{} H{heads} S{seq} D{dim}{mask}{}", self.dtypes, self.batch, self.pass_after(" "))
    }

    /// The words for the backward pass after `between`; nothing for the forward pass.
    fn pass_after(&self, between: &str) -> String {
        match (self.pass, self.deterministic) {
            (PassKind::Forward, _) => String::new(),
            (PassKind::Backward, false) => format!("{between}backward"),
            (PassKind::Backward, true) => format!("{between}backward:deterministic"),
        }
    }
}

/// Two extents, written once if they are equal.
fn pair(a: usize, b: usize, between: char) -> String {
    if a == b { a.to_string() } else { format!("{a}{between}{b}") }
}

/// The shape in the form that commands read: `4,32/8,1x8192,128,bf16,causal`. Query and key extents that are
/// equal are written once; so are those of keys and values.
impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let heads = pair(self.heads_q, self.heads_kv, '/');
        let seq = pair(self.seq_q, self.seq_kv, 'x');
        let dim = pair(self.head_dim, self.head_dim_v, '/');
        write!(f, "{},{heads},{seq},{dim},{}", self.batch, self.dtypes)?;
        if self.mask != Band::FULL {
            write!(f, ",{}", self.mask)?;
        }
        f.write_str(&self.pass_after(","))
    }
}
