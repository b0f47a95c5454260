//! Tables of plain text.

use std::io::Write;

use crate::terminal::one_line;

/// Prints rows under a header, with aligned columns. The first column is aligned to the left. Other columns
/// are aligned to the right if all their cells are numbers. Line feeds in a cell are escaped.
pub fn print(out: &mut impl Write, header: &[&str], rows: &[Vec<String>]) -> std::io::Result<()> {
    let shown = |row: &Vec<String>| row.iter().map(|cell| one_line(cell).into_owned()).collect();
    let rows: Vec<Vec<String>> = rows.iter().map(shown).collect();
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain(std::iter::once(header[column].chars().count())).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let numeric = |cell: &str| cell.starts_with(|c: char| c.is_ascii_digit() || c == '–' || c == '-');
    let right: Vec<bool> = (0..header.len())
        .map(|c| c > 0 && rows.iter().filter_map(|r| r.get(c)).all(|cell| numeric(cell)))
        .collect();
    let mut line = |cells: &mut dyn Iterator<Item = &str>| {
        let mut text = String::new();
        for ((cell, &width), &right) in cells.zip(&widths).zip(&right) {
            let pad = " ".repeat(width.saturating_sub(cell.chars().count()));
            text += &if right { format!("{pad}{cell}  ") } else { format!("{cell}{pad}  ") };
        }
        writeln!(out, "{}", text.trim_end())
    };
    line(&mut header.iter().copied())?;
    rows.iter().try_for_each(|row| line(&mut row.iter().map(String::as_str)))
}
