//! The tables that ship with the crate. `build.rs` compresses them.

/// A compressed table of `tuned`.
#[derive(Clone, Copy)]
pub struct ShippedTable(&'static [u8]);

/// The tables of tuned plans, one per device.
pub const TUNED: [ShippedTable; 2] = [
    ShippedTable(include_bytes!(concat!(env!("OUT_DIR"), "/h200"))),
    ShippedTable(include_bytes!(concat!(env!("OUT_DIR"), "/predicted"))),
];
/// The times of the sweep.
pub const SWEEP: ShippedTable = ShippedTable(include_bytes!(concat!(env!("OUT_DIR"), "/sweep")));

impl ShippedTable {
    /// The table's JSON lines.
    pub fn text(self) -> String {
        let text = miniz_oxide::inflate::decompress_to_vec(self.0).expect("build.rs compressed the table");
        String::from_utf8(text).expect("a table is UTF-8")
    }
}
