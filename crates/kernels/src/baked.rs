//! [`Baked`]: the properties of a problem on which the code of a plan depends.

use attend::ProgramCode;
use problem::{Band, DTypes, ElementType, Lengths, Operand, OperandMap, Problem, Tensor};
use tile::Sign;

use crate::derivatives::TableGradient;

/// Element types and sizes, of which tiles and products are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Dims {
    /// Element types of the tensors.
    pub dtypes: DTypes,
    /// Elements of a query or key row.
    pub head_dim: usize,
    /// Elements of a value or output row.
    pub head_dim_v: usize,
    /// Query heads per K/V head.
    pub group_size: usize,
    /// Whether V is a view of K, and the code makes use of that.
    pub v_in_k: bool,
}

impl From<&Problem> for Dims {
    fn from(problem: &Problem) -> Dims {
        let &Problem { dtypes, head_dim, head_dim_v, v_in_k, .. } = problem;
        Dims { dtypes, head_dim, head_dim_v, group_size: problem.group_size(), v_in_k }
    }
}

/// All properties of a problem that the code of a plan depends on. One plan emits the same code for all
/// problems with equal [`Baked`], for one architecture.
///
/// All other properties are launch parameters: the batch, lengths, sizes of the band's bounds, the cap, the
/// magnitude of the scale, strides other than those below, parameters of programs, and the grid. (`wide` and
/// `flat` are a limit of the scale, of the cap and of the grid.) A generator emits the body of a kernel from
/// the plan, this value and the declared parameters, without the problem.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Baked {
    /// Element types and sizes.
    pub dims: Dims,
    /// Whether the LSE is stored.
    pub lse: bool,
    /// Whether the rows continue from a result over other keys.
    pub continues: bool,
    /// Whether probabilities are dropped.
    pub dropout: bool,
    /// Query heads, where the code computes an index over all heads: for the LSE, for partial results and
    /// for dropout; else 0.
    pub heads_q: usize,
    /// The band, with sizes 0 and 1: 0 for an upper bound on the diagonal, and 1 for every other bound.
    pub band: Band,
    /// Whether logits are capped.
    pub softcap: bool,
    /// Whether logits may be so large that the exponent must not have their factor: a scale above 128, or a
    /// cap above 64.
    pub wide: bool,
    /// The operands of the score that there are ([`problem::Score::OPERANDS`]).
    pub of_heads: Vec<Operand>,
    /// The transformation of Q that lets the factor of the scores be positive.
    pub sign: Sign,
    /// The arrays of lengths that exist. Row counts are 0, since code does not depend on them.
    pub lengths: Lengths,
    /// The rows of a page, if K and V lie in pages.
    pub pages: Option<u32>,
    /// The descale factors that there are: the rows that share a factor; `None` for factors of heads.
    pub scales: OperandMap<Option<u32>>,
    /// The code of the programs.
    pub programs: Option<ProgramCode>,
    /// The code of the mask program in the kernel that lists blocks, if the plan lists them.
    pub listed: Option<ProgramCode>,
    /// The tables of the programs.
    pub tables: Vec<TableKind>,
    /// The gradients of tables that the backward pass returns.
    pub(crate) table_gradients: Vec<TableGradient>,
    /// Bytes between the rows of the tensors whose rows' addresses the code computes.
    pub row_bytes: OperandMap<i64>,
    /// The dimensions of Q, K and V that their tensor maps repeat, where there are such maps.
    pub repeated: OperandMap<Repeated>,
    /// Whether rows of O are stored in chunks of 16 bytes, where the plan does not say.
    pub chunks_out: bool,
    /// Whether the blocks of keys end where the keys end, in every batch entry, and the code makes use of
    /// that.
    pub divides: bool,
    /// Whether every block of keys has a stage of its own, where the code asks.
    pub resident: bool,
    /// Whether the CTAs of each kernel have a flat grid: there are more batch entries or heads than a launch
    /// has CTAs in y and z.
    pub flat: bool,
    /// The most query rows of a tile, rounded up to a power of two, where the code asks; else 0.
    pub tile_rows: u32,
    /// Whether sums that many CTAs add to have a fixed order of additions, where the code asks.
    pub deterministic: bool,
    /// The number of a path's last steps in which some row does not see a key, where the code has paths; else
    /// 0.
    pub hidden_steps: u32,
}

/// The dimensions of a tensor map that have one index for all batch entries or heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Repeated {
    /// Whether the batch entries are one.
    pub batch: bool,
    /// Whether the heads are one.
    pub head: bool,
}

/// The properties of a table on which code depends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TableKind {
    /// Type of the elements.
    pub dtype: ElementType,
    /// Number of dimensions.
    pub dimensions: usize,
    /// Whether neighbours in the last dimension are neighbours in memory.
    pub contiguous: bool,
}

impl From<&Baked> for Dims {
    fn from(baked: &Baked) -> Dims {
        baked.dims
    }
}

impl Baked {
    /// Query heads per K/V head.
    pub(crate) const fn group_size(&self) -> u32 {
        self.dims.group_size as u32
    }

    /// Elements of a value or output row.
    pub(crate) const fn head_dim_v(&self) -> u32 {
        self.dims.head_dim_v as u32
    }

    /// Bytes between the rows of a tensor.
    pub(crate) fn row_bytes(&self, tensor: Tensor) -> i64 {
        self.row_bytes[tensor.into()]
    }

    /// Whether the number of keys, or the row where they start, differs between batch entries.
    pub(crate) const fn keys_are_uneven(&self) -> bool {
        !self.lengths.kv.is_even() || self.lengths.left_padded
    }
}
