//! What the code depends on in every family.

use attend::ProgramCode;
use problem::{Band, Lengths, Operand, OperandMap, Problem, Score, SideLengths, Strides, Tensor};
use tile::Sign;

use super::contract::{band, is_wide, stepped};
use super::lengths::is_packed;
use crate::{Baked, Dims, Repeated, TableKind};

impl Baked {
    /// What every family bakes. `packed` says whether the rows of a tile belong to several heads.
    pub(crate) fn of(problem: &Problem, packed: bool) -> Baked {
        let (lse, continues) = (problem.pass.lse(), problem.pass.continues());
        let dropout = problem.dropout.is_some();
        // Without a program, nothing reads a table.
        let tables = problem.programs.tables.iter().filter(|_| !problem.programs.is_empty());
        let tables = tables.map(|table| TableKind {
            dtype: table.dtype,
            dimensions: table.extents.len(),
            contiguous: table.strides.last() == Some(&1),
        });
        let factors = problem.scales.each().map(|(tensor, layout)| (Operand::Descale(tensor), layout.rows));
        let of_heads = Score::OPERANDS.into_iter().filter(|&operand| problem.score.has(operand));
        Baked {
            dims: Dims { v_in_k: false, ..problem.into() },
            lse,
            continues,
            dropout,
            heads_q: if lse || continues || dropout { problem.heads_q } else { 0 },
            band: unsized_band(band(problem)),
            softcap: problem.score.softcap.is_some(),
            wide: is_wide(problem),
            of_heads: of_heads.collect(),
            sign: if problem.softmax_scale() < 0.0 { Sign::Negate } else { Sign::Keep },
            lengths: unsized_lengths(problem.lengths),
            pages: problem.storage.pages().map(|pages| pages.rows as u32),
            scales: factors.collect(),
            programs: (!problem.programs.is_empty()).then(|| ProgramCode::new(problem, packed)),
            listed: None,
            tables: tables.collect(),
            table_gradients: Vec::new(),
            row_bytes: OperandMap::default(),
            repeated: OperandMap::default(),
            chunks_out: false,
            divides: false,
            resident: false,
            flat: false,
            tile_rows: 0,
            deterministic: false,
            hidden_steps: 0,
        }
    }

    /// With the row strides of tensors.
    pub(crate) fn with_row_bytes(mut self, problem: &Problem, tensors: &[Tensor]) -> Baked {
        for &tensor in tensors {
            let rows = problem.extents(tensor)[2];
            self.row_bytes.insert(tensor.into(), stepped(problem, tensor, rows, problem.strides(tensor).row));
        }
        self
    }

    /// With the dimensions of tensor maps of tensors.
    pub(crate) fn with_maps(mut self, problem: &Problem, tensors: &[Tensor]) -> Baked {
        self.repeated.extend(tensors.iter().map(|&tensor| {
            let Strides { batch, head, .. } = problem.strides(tensor);
            let batch = is_packed(problem, tensor) || batch == 0;
            (tensor.into(), Repeated { batch, head: head == 0 })
        }));
        self
    }
}

/// The band with sizes 0 and 1.
fn unsized_band(band: Band) -> Band {
    let Band { corner, before, after } = band;
    Band { corner, before: before.map(|_| 1), after: after.map(|keys| keys.min(1)) }
}

/// The lengths without the rows of packed tensors.
fn unsized_lengths(lengths: Lengths) -> Lengths {
    let side = |side: SideLengths| SideLengths { packed: side.packed.map(|_| 0), ..side };
    Lengths { q: side(lengths.q), kv: side(lengths.kv), ..lengths }
}
