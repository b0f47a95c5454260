//! Tables that the score program reads from shared memory ([`Tables::Shared`]): which reads qualify, the
//! rings of tiles, and the tensor maps.

use attend::{ProgramCode, StagedParams, TileRead, half_of};
use problem::{Operand, Problem, Table};
use ptx::{Builder, Element, Half};
use tile::{Pipeline, SwizzledTile, TensorRows};

use super::plan::{Tables, WgmmaPlan};
use crate::PlanError;
use crate::contract::Contract;
use crate::forward::contract::STRIDE_LIMIT;

/// Tensor maps need strides and addresses that are multiples of 16 bytes: 8 elements of 16 bits.
const UNIT: i64 = 8;

/// A property of a table that excludes tensor maps.
struct Misfit {
    what: String,
    value: String,
    accepted: String,
}

/// The first property of a table that excludes tiles for a read.
fn misfit(problem: &Problem, read: &TileRead) -> Option<Misfit> {
    let table = &problem.programs.tables[read.table];
    let of = |what: String, value: String, accepted: String| {
        Some(Misfit { what: format!("{what} of table_{}", read.table), value, accepted })
    };
    if half_of(table.dtype).is_none() {
        let value = format!("{:?}", table.dtype).to_lowercase();
        return of("type".to_owned(), value, "f16 and bf16".to_owned());
    }
    let last = table.extents.len() - 1;
    let most = STRIDE_LIMIT / 2;
    for (dimension, (&extent, &stride)) in table.extents.iter().zip(&table.strides).enumerate() {
        let (fits, accepted) = if dimension == last {
            (stride == 1, "1".to_owned())
        } else {
            let least = if dimension == read.query { UNIT } else { 0 };
            let fits = extent == 1 || stride % UNIT == 0 && (least..most).contains(&stride);
            (fits, format!("multiples of {UNIT} from {least} to 2^39 elements, as tensor maps need"))
        };
        if !fits {
            return of(format!("stride {dimension}"), stride.to_string(), accepted);
        }
    }
    None
}

/// Extent and stride in bytes of a table in a tensor map. Elements that repeat along a dimension count as
/// one, and the stride of an extent of 1 is not used.
fn mapped(table: &Table, dimension: Option<usize>) -> (u64, u64) {
    match dimension.map(|d| (table.extents[d], table.strides[d])) {
        None | Some((1, _) | (_, 0)) => (1, 2 * UNIT as u64),
        Some((extent, stride)) => (extent as u64, 2 * stride as u64),
    }
}

impl WgmmaPlan {
    /// The code of the problem's programs, with the reads that come from shared memory.
    pub(super) fn staging(&self, problem: &Problem, code: ProgramCode) -> ProgramCode {
        match self.tables {
            Tables::Registers => code,
            Tables::Shared => code.staging(|read| misfit(problem, read).is_none()),
        }
    }

    /// The reads whose elements may come from shared memory, whatever the strides are.
    fn tile_reads(&self, problem: &Problem) -> Vec<TileRead> {
        if problem.programs.score.is_none() {
            return Vec::new();
        }
        ProgramCode::new(problem, self.packed_heads(problem) > 1).tile_reads()
    }

    /// The reads whose elements come from shared memory.
    fn staged(&self, problem: &Problem) -> Vec<TileRead> {
        match self.tables {
            Tables::Registers => Vec::new(),
            Tables::Shared => {
                let reads = self.tile_reads(problem).into_iter();
                reads.filter(|read| misfit(problem, read).is_none()).collect()
            }
        }
    }

    /// Number of reads whose elements come from shared memory.
    pub(super) fn staged_reads(&self, problem: &Problem) -> u32 {
        self.staged(problem).len() as u32
    }

    /// The tables whose addresses must be multiples of 16 bytes, because the kernel loads them by TMA.
    pub(super) fn aligned_tables(&self, problem: &Problem) -> Vec<u8> {
        self.staged(problem).iter().map(|read| read.table as u8).collect()
    }

    /// The plan that reads tables from shared memory where that is possible.
    pub(super) fn with_shared_tables(self, problem: &Problem) -> WgmmaPlan {
        let plan = WgmmaPlan { tables: Tables::Shared, ..self };
        if plan.staged(problem).is_empty() { WgmmaPlan { tables: Tables::Registers, ..plan } } else { plan }
    }

    /// Whether some plan of the family can read a table from shared memory.
    pub(super) fn may_share_tables(problem: &Problem) -> bool {
        let programs = &problem.programs;
        programs.score.is_some()
            && ProgramCode::new(problem, false)
                .tile_reads()
                .iter()
                .any(|read| misfit(problem, read).is_none())
    }

    /// Checks that there are tables in shared memory, if the plan has them there.
    pub(super) fn check_tables(&self, problem: &Problem, family: &'static str) -> Result<(), PlanError> {
        if self.tables == Tables::Registers || !self.staged(problem).is_empty() {
            return Ok(());
        }
        let refuse = |what: &str, value: &str, accepted: &str| {
            let accepted = format!("{accepted} with tables = shared");
            Err(PlanError::unsupported(family, what, value, accepted))
        };
        if self.packed_heads(problem) > 1 {
            return refuse("packing", "packed", "apart");
        }
        match self.tile_reads(problem).iter().find_map(|read| misfit(problem, read)) {
            Some(Misfit { what, value, accepted }) => refuse(&what, &value, &accepted),
            None => {
                refuse("score program", "no such read", "one that reads a table at the query and the key")
            }
        }
    }

    /// The tile of a table for the rows of a CTA and the keys of a block.
    pub(super) const fn table_tile(&self) -> SwizzledTile {
        SwizzledTile::new(self.block_m(), self.block_n).along_columns()
    }

    /// Bytes of shared memory for tables: rings of tiles with their barriers.
    pub(super) fn table_bytes(&self, problem: &Problem) -> u32 {
        let ring = self.stages * self.table_tile().bytes() + Pipeline::bytes(self.stages);
        self.staged_reads(problem) * ring
    }

    /// Declares the tables in shared memory.
    pub(super) fn declare_tables(
        &self,
        k: &mut Builder,
        c: &mut Contract<'_>,
        problem: &Problem,
        code: &ProgramCode,
    ) -> Vec<StagedParams> {
        let tile = self.table_tile();
        let mut declare = |(i, read): (usize, &TileRead)| {
            let table = &problem.programs.tables[read.table];
            let half = half_of(table.dtype)?;
            let others = read.others();
            let [outer, inner] = others.map(|dimension| mapped(table, dimension));
            let query = mapped(table, Some(read.query));
            let keys = table.extents[table.extents.len() - 1] as u64;
            let operand = Operand::Table(read.table as u8);
            let map = c.operand_map(k, operand, &format!("read_{i}_map"), |buffer| {
                tile.map(&TensorRows {
                    buffer,
                    offset: 0,
                    element: if half == Half::F16 { Element::F16 } else { Element::Bf16 },
                    extents: [outer.0, inner.0, query.0, keys],
                    strides: [outer.1, inner.1, query.1],
                })
            });
            let mut last = |name: &str, dimension: Option<usize>, extent: u64| {
                dimension.map(|_| c.u32(k, &format!("read_{i}_last_{name}"), extent as u32 - 1))
            };
            let lasts = [last("outer", others[0], outer.0), last("inner", others[1], inner.0)];
            Some(StagedParams { map: map?, half, lasts })
        };
        code.staged().enumerate().filter_map(&mut declare).collect()
    }
}
