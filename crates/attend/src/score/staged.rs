//! Table elements in tiles in shared memory, which a producer loads by TMA as it loads K and V.
//!
//! A tile has the rows of a CTA and the keys of a KV block. A matrix that `ldmatrix` reads gives each lane
//! two neighbouring elements of one row, which are those of the lane's scores. Rows and keys beyond the table
//! are zero; the scores there are hidden or not stored. Keys beyond the end of a sequence may have any
//! element, because they are hidden after the score program.

use problem::program::Id;
use ptx::{Builder, Half, R32, Src, TensorMapPtr};
use tile::{Consumer, RowStream, TileRing};

use super::lower::{Index, Node, ProgramCode, TileRead, ValuePlace};
use super::program::{Scope, ScorePrograms, StagedParams};
use super::words::Words;
use crate::RowRange;

impl ProgramCode {
    /// The read of a node, if its elements may come from tiles.
    fn tile_read(&self, id: Id) -> Option<TileRead> {
        let Node::Load { table, parts } = &self.nodes[id] else { return None };
        let indices = parts.iter().filter_map(|&part| match &self.nodes[part] {
            Node::Address { indices, .. } => Some(indices.iter().copied()),
            _ => None,
        });
        let mut others: Vec<Index> = indices.flatten().collect();
        others.sort_unstable_by_key(|index| index.dimension);
        others.pop().filter(|last| self.is_key(last.value))?;
        let query = others.iter().position(|index| self.is_query(index.value))?;
        let query = others.remove(query).dimension;
        let uniform = others.iter().all(|index| self.places[index.value] == ValuePlace::Once);
        (uniform && others.len() <= 2).then_some(TileRead { table: *table, query, others })
    }

    /// The reads of the score program whose elements may come from tiles. There are none if the rows of a
    /// tile belong to several heads.
    pub fn tile_reads(&self) -> Vec<TileRead> {
        self.tile_loads().into_iter().map(|(_, read)| read).collect()
    }

    fn tile_loads(&self) -> Vec<(Id, TileRead)> {
        if self.packed {
            return Vec::new();
        }
        let mut needed = self.needed_by(self.score.into_iter());
        needed.sort_unstable();
        needed.into_iter().filter_map(|id| Some((id, self.tile_read(id)?))).collect()
    }

    /// The code with those of [`ProgramCode::tile_reads`] staged, in tiles in shared memory, that `fits`
    /// accepts.
    #[must_use]
    pub fn staging(mut self, fits: impl Fn(&TileRead) -> bool) -> ProgramCode {
        for (id, read) in self.tile_loads() {
            if fits(&read) {
                self.nodes[id] = Node::Staged(read);
            }
        }
        self
    }

    /// The staged reads.
    pub fn staged(&self) -> impl Iterator<Item = &TileRead> {
        self.staged_loads().map(|(_, read)| read)
    }

    fn staged_loads(&self) -> impl Iterator<Item = (Id, &TileRead)> {
        self.nodes.iter().enumerate().filter_map(|(id, node)| match node {
            Node::Staged(read) => Some((id, read)),
            _ => None,
        })
    }
}

impl ScorePrograms {
    /// With the parameters of the staged reads, in the order of [`ProgramCode::staged`].
    #[must_use]
    pub fn with_staged(self, staged: Vec<StagedParams>) -> ScorePrograms {
        ScorePrograms { staged, ..self }
    }

    /// The tensor map of each staged read.
    pub fn staged_maps(&self) -> impl Iterator<Item = TensorMapPtr> {
        self.staged.iter().map(|params| params.map)
    }

    /// The tensor map of each staged read, with the coordinates of a tile of rows in its outer and its inner
    /// dimension.
    pub fn staged_places(
        &self,
        k: &mut Builder,
        rows: &RowRange,
        [head, batch]: [R32; 2],
    ) -> Vec<(TensorMapPtr, [Src<R32>; 2])> {
        let mut at = Scope::new(self, rows);
        (at.head, at.batch) = (Some(head), Some(batch));
        let mut place = |params: &StagedParams, read: &TileRead| {
            let mut indices = read.others.iter().rev();
            let mut coordinate = |last: Option<R32>| match (indices.next(), last) {
                (Some(index), Some(last)) => {
                    let value = at.value(k, index.value).int();
                    let value = if index.clamp_low { k.max_s(value, 0) } else { value };
                    k.min_s(value, last).into()
                }
                _ => 0.into(),
            };
            let [outer, inner] = params.lasts;
            let inner = coordinate(inner);
            (params.map, [coordinate(outer), inner])
        };
        self.staged.iter().zip(self.code.staged()).map(|(params, read)| place(params, read)).collect()
    }
}

/// The rings of tiles of a consumer warp's staged reads. Each KV block has a tile in every ring.
#[derive(Clone, Debug, Default)]
pub struct StagedTables {
    tables: Vec<StagedTable>,
}

#[derive(Clone, Copy, Debug)]
struct StagedTable {
    load: Id,
    half: Half,
    tiles: RowStream,
}

impl StagedTables {
    /// The tables in `rings`, one for each staged read.
    pub fn new(
        k: &mut Builder,
        programs: &ScorePrograms,
        rings: &[TileRing],
        consumer: &Consumer,
    ) -> StagedTables {
        let loads = programs.code.staged_loads().map(|(load, _)| load);
        let tables = loads.zip(&programs.staged).zip(rings);
        let table = |((load, params), &ring): ((Id, &StagedParams), &TileRing)| StagedTable {
            load,
            half: params.half,
            tiles: RowStream::new(k, ring, consumer),
        };
        StagedTables { tables: tables.map(table).collect() }
    }

    /// Waits for the tiles of the block, reads the first `columns` columns of the warp's rows, and releases
    /// the tiles.
    pub(crate) fn read(&self, k: &mut Builder, columns: u32) -> Vec<Words> {
        let mut of_table = |table: &StagedTable| {
            table.tiles.wait(k);
            let matrices = table.tiles.read(k, columns);
            table.tiles.release(k);
            // A 16×16 tile has its left half in the first two words, the upper 8 rows first.
            let row = |i: usize| matrices.iter().flat_map(|words| [words[i], words[i + 2]]).collect();
            Words { load: table.load, half: table.half, of_rows: vec![row(0), row(1)] }
        };
        self.tables.iter().map(&mut of_table).collect()
    }

    /// Releases the tiles of a block that the warp does not visit.
    pub(crate) fn skip(&self, k: &mut Builder) {
        for table in &self.tables {
            table.tiles.wait(k);
            table.tiles.release(k);
        }
    }
}
