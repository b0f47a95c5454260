//! Elements of a table in registers, for one KV block.

use problem::program::Id;
use ptx::{Builder, Half, R32};

use super::emit::Value;

/// The elements that one read of a table needs in a block.
#[derive(Clone, Debug)]
pub struct Words {
    /// The node that reads the table.
    pub(super) load: Id,
    pub(super) half: Half,
    /// For each of the lane's rows, a word for each pair of columns.
    pub(super) of_rows: Vec<Vec<R32>>,
}

impl Words {
    /// The elements of a row in an even column and in the column after it.
    pub(super) fn pair(&self, k: &mut Builder, row: usize, column: usize) -> (Id, [Value; 2]) {
        (self.load, k.unpack(self.half, self.of_rows[row][column / 2]).map(Value::Float))
    }
}
