//! Manual pages.

use std::io;
use std::path::Path;

use clap_mangen::Man;

/// The lines that define `\*(Aq`. Each section of `clap_mangen` begins with them.
const PREAMBLE: &str = ".ie \\n(.g .ds Aq \\(aq\n.el .ds Aq '\n";

/// Writes the pages of a command and of all commands below it to a folder.
pub fn write_all(command: clap::Command, folder: &Path) -> io::Result<()> {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    write(&command, folder)
}

fn write(command: &clap::Command, folder: &Path) -> io::Result<()> {
    command
        .get_subcommands()
        .filter(|below| !below.is_hide_set())
        .try_for_each(|below| write(below, folder))?;
    std::fs::write(folder.join(Man::new(command.clone()).get_filename()), page(command)?)
}

/// The page of a command.
pub fn page(command: &clap::Command) -> io::Result<String> {
    let version = concat!("flashcore ", env!("CARGO_PKG_VERSION"));
    let man = Man::new(command.clone()).source(version).manual("FlashCore");
    let mut roff = Vec::new();
    man.render_title(&mut roff)?;
    man.render_name_section(&mut roff)?;
    man.render_synopsis_section(&mut roff)?;
    man.render_description_section(&mut roff)?;
    man.render_options_section(&mut roff)?;
    if command.get_subcommands().any(|below| !below.is_hide_set()) {
        man.render_subcommands_section(&mut roff)?;
    }
    let mut page = format!("{PREAMBLE}{}", String::from_utf8_lossy(&roff).replace(PREAMBLE, ""));
    if let Some(after) = command.get_after_long_help().or(command.get_after_help()) {
        page += &sections(&after.to_string());
    }
    if command.get_name() == "check" && command.get_arguments().any(|arg| arg.get_id() == "launch") {
        let format = block(check::launchfile::FORMAT.lines());
        page += &format!(".SH LAUNCH FILE\nTOML; every key, with what it means:\n.PP\n{format}");
    }
    Ok(page)
}

/// The sections of the text below the help: examples, then exit codes.
fn sections(after: &str) -> String {
    let (examples, rest) = match after.strip_prefix("Examples:\n") {
        Some(text) => text.split_once("\n\n").unwrap_or((text, "")),
        None => ("", after),
    };
    let mut page = String::new();
    if !examples.is_empty() {
        page += &format!(".SH EXAMPLES\n{}", block(examples.lines().map(str::trim_start)));
    }
    if let Some(codes) = rest.strip_prefix("Exit codes: ") {
        page += &format!(".SH EXIT STATUS\n{}\n", escaped(codes));
    }
    page
}

/// Lines that are not filled.
fn block<'a>(lines: impl Iterator<Item = &'a str>) -> String {
    let lines: String = lines.map(|line| format!("{}\n", escaped(line))).collect();
    format!(".nf\n{lines}.fi\n")
}

/// A line of text in roff.
fn escaped(line: &str) -> String {
    let line = line.replace('\\', "\\e").replace('-', "\\-").replace('\'', "\\*(Aq");
    if line.starts_with('.') { format!("\\&{line}") } else { line }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_keeps_its_lines() {
        let mut command = super::super::command();
        command.build();
        let check = page(command.find_subcommand("check").unwrap()).unwrap();
        for part in [
            ".SH EXAMPLES\n.nf\nflashcore check kernel.ptx \\-\\-launch kernel.toml\n",
            ".SH LAUNCH FILE\n",
            ".nf\n[problem]  ",
            "    and timeout = 60\n.fi\n",
            concat!("\"flashcore ", env!("CARGO_PKG_VERSION"), "\" FlashCore\n"),
        ] {
            assert!(check.contains(part), "{part}: {check}");
        }
        assert!(!check.contains("SH EXTRA"), "{check}");
        let program = page(&command).unwrap();
        assert!(program.contains(".SH EXIT STATUS\n0 success; 1 a check"), "{program}");
    }
}
