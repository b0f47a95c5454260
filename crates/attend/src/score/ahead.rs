//! Reads the table elements of a KV block while the block before it is processed.
//!
//! An element that is read where it is used exposes the latency of global memory once per block. Registers
//! hold the elements of the next block, so that the softmax and the products of a block hide that latency.
//! Only tables of 16-bit elements along the keys are read this way. The first block of a tile, partial blocks
//! and tables whose words are not aligned are read in place. A kernel with a producer can read from tiles in
//! shared memory instead (`staged.rs`).
//!
//! A lane needs two neighbouring elements of every eight columns. If the lanes read them as words, each
//! request touches half a sector of eight rows, and the L1 cache becomes the bound (92 % busy on an H200 with
//! a bias tensor). Each lane of a quad therefore reads eight neighbouring elements of 32 columns, and the
//! lanes exchange words before they use them.

use problem::program::Id;
use ptx::{Builder, Global, Half, Pred, R32, Type};
use tile::QuadTransposition;

use super::lower::Node;
use super::program::{RowPrograms, Scope, ScorePrograms, half_of};
use super::words::Words;
use crate::Coverage;

/// Words that a lane of a quad reads at once, and the lanes of a quad.
const QUAD: usize = 4;

impl ScorePrograms {
    /// Reads table elements one block ahead where that is possible. A warpgroup then calls
    /// [`RowPrograms::read_ahead`] in every block.
    #[must_use]
    pub fn reading_ahead(self) -> ScorePrograms {
        ScorePrograms { reads_ahead: true, ..self }
    }

    /// Registers that a lane needs to read ahead, with `warp_rows` rows and `warp_keys` keys of each block.
    pub fn registers_ahead(&self, (warp_rows, warp_keys): (u32, u32)) -> u32 {
        self.loads_ahead().len() as u32 * (warp_rows / 8) * (warp_keys / 8)
    }

    /// The nodes whose elements can be read ahead, with the type of the elements.
    fn loads_ahead(&self) -> Vec<(Id, Half)> {
        let roots = self.code.score.into_iter().chain(self.code.mask.filter(|_| self.masks_full));
        let needed = self.code.needed_by(roots);
        let loads = needed.into_iter().filter(|&id| self.is_along_keys(id));
        loads.filter_map(|id| Some((id, half_of(self.table_of(id)?.dtype)?))).collect()
    }

    /// Registers for the elements that are read ahead. They are defined here, because only some branches
    /// write them.
    pub(super) fn ahead(&self, k: &mut Builder, (warp_rows, warp_keys): (u32, u32)) -> Vec<Words> {
        let loads = if self.reads_ahead { self.loads_ahead() } else { Vec::new() };
        let row = |k: &mut Builder| (0..warp_keys / 8).map(|_| k.mov(0)).collect();
        let words = |k: &mut Builder| (0..warp_rows / 8).map(|_| row(k)).collect();
        loads.into_iter().map(|(load, half)| Words { load, half, of_rows: words(k) }).collect()
    }
}

impl RowPrograms<'_> {
    /// Whether elements are read ahead.
    pub const fn reads_ahead(&self) -> bool {
        !self.ahead.is_empty()
    }

    /// Reads the elements of a block, which begins at key `origin`. All of its keys exist.
    pub fn read_ahead(&self, k: &mut Builder, origin: R32) {
        let (Some(pairs), Some(eights)) = (self.pairs(k), self.eights(k)) else { return };
        k.if_else(
            eights,
            |k| self.read_eights(k, origin),
            |k| k.if_(pairs, |k| self.read_words(k, origin, 0)),
        );
    }

    /// If the lanes have read eights, gives each lane the words of its own columns.
    pub(super) fn exchange_eights(&self, k: &mut Builder) {
        if let (true, Some(eights)) = (self.reads_ahead(), self.eights(k)) {
            k.if_(eights, |k| self.exchange(k));
        }
    }

    /// Whether rows of all tables are aligned to vectors of eight elements.
    fn eights(&self, k: &mut Builder) -> Option<Pred> {
        self.all_tables(k, |table| table.eights)
    }

    /// Reads eight columns of each 32 into four registers, and a word of each 8 columns of the rest.
    fn read_eights(&self, k: &mut Builder, origin: R32) {
        // The lane's eight columns begin at four times its first column.
        let first = k.mad(self.column, QUAD as u32, origin);
        let mut at = self.scope(first);
        let mut whole = 0;
        for ahead in &self.ahead {
            for (row, words) in ahead.of_rows.iter().enumerate() {
                let quads = words.chunks_exact(QUAD);
                whole = QUAD * quads.len();
                for (offset, to) in (0..).step_by(32).zip(quads) {
                    let from = self.address(k, &mut at, ahead.load, (row, offset));
                    k.ld_read_only_vec_to([to[0], to[1], to[2], to[3]], from);
                }
            }
        }
        self.read_words(k, origin, whole);
    }

    /// Reads the words of each row from number `begin` on.
    fn read_words(&self, k: &mut Builder, origin: R32, begin: usize) {
        let first = k.add(origin, self.column);
        let mut at = self.scope(first);
        for ahead in &self.ahead {
            for (row, words) in ahead.of_rows.iter().enumerate() {
                for (offset, &to) in (0..).step_by(8).zip(words).skip(begin) {
                    let from = self.address(k, &mut at, ahead.load, (row, offset));
                    let word: R32 = k.ld_read_only(Type::B32, from);
                    k.mov_to(to, word);
                }
            }
        }
    }

    /// The scope of a full block in which the lane's first column is key `first`.
    fn scope(&self, first: R32) -> Scope<'_> {
        let mut at = Scope::new(self.programs, &self.rows);
        at.once.clone_from(&self.once);
        at.first_key = Some((first, Coverage::Full));
        at
    }

    /// The address that a load reads in one of the lane's rows, `offset` columns after the first column.
    fn address(&self, k: &mut Builder, at: &mut Scope, load: Id, (row, offset): (usize, u32)) -> Global {
        let Node::Load { parts, .. } = &self.programs.code.nodes[load] else {
            unreachable!("the nodes that are read ahead are loads")
        };
        at.offset = offset;
        at.column.fill(None);
        at.row.clone_from(&self.of_rows[row]);
        at.element.fill(None);
        at.sum(k, parts)
    }

    /// After [`RowPrograms::read_eights`], gives each lane the words of its own columns.
    fn exchange(&self, k: &mut Builder) {
        let transposition = QuadTransposition::new(k, self.column);
        for words in self.ahead.iter().flat_map(|ahead| &ahead.of_rows) {
            for quad in words.chunks_exact(QUAD) {
                transposition.apply_in_place(k, [quad[0], quad[1], quad[2], quad[3]]);
            }
        }
    }
}
