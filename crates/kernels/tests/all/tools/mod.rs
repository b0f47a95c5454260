//! ptxas and nvdisasm, if `cargo xtask test` or the environment provides them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use ptx::Kernel;

/// The result of assembling a kernel.
pub struct Assembled {
    pub registers: u32,
    /// Bytes of spill stores and loads.
    #[allow(dead_code, reason = "not every test looks for spills")]
    pub spills: u32,
    cubin: Scratch,
}

/// A temporary file, deleted on drop.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        // A file that stays in the temporary folder does no harm.
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Assembled {
    /// The machine code in the cubin: the executable sections of an ELF file, one for each entry.
    #[allow(dead_code, reason = "not every test compares machine code")]
    pub fn code(&self) -> Vec<u8> {
        let file = std::fs::read(&self.cubin.0).unwrap();
        let number = |at: usize, bytes: usize| {
            file[at..at + bytes].iter().rev().fold(0, |number, &byte| number << 8 | usize::from(byte))
        };
        // Fields of the ELF header and of section headers (Elf64_Ehdr, Elf64_Shdr).
        let (headers, size, count) = (number(0x28, 8), number(0x3A, 2), number(0x3C, 2));
        let sections = (0..count).map(|section| headers + section * size);
        let executable = sections.filter(|section| number(section + 8, 8) & 4 != 0);
        let code: Vec<u8> = executable
            .flat_map(|section| {
                let (start, bytes) = (number(section + 0x18, 8), number(section + 0x20, 8));
                file[start..start + bytes].to_vec()
            })
            .collect();
        assert!(!code.is_empty(), "no executable section");
        code
    }
}

fn scratch(suffix: &str) -> Scratch {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let n = COUNT.fetch_add(1, Ordering::Relaxed);
    Scratch(std::env::temp_dir().join(format!("flashcore-{}-{n}.{suffix}", std::process::id())))
}

/// The path of the tool that an environment variable names.
pub fn find(variable: &str) -> Option<PathBuf> {
    let path = std::env::var_os(variable).map(PathBuf::from);
    if path.is_none() {
        eprintln!("{variable} is not set: not checked");
    }
    path
}

/// Assembles a kernel for its target.
pub fn assemble(ptxas: &Path, kernel: &Kernel) -> Assembled {
    let (text, cubin) = (scratch("ptx"), scratch("cubin"));
    std::fs::write(&text.0, kernel.module.to_string()).unwrap();
    let arch = format!("-arch={}", kernel.module.target);
    let output =
        Command::new(ptxas).args(["-v", &arch]).arg(&text.0).arg("-o").arg(&cubin.0).output().unwrap();
    let log = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "ptxas refuses the kernel:\n{log}");
    // C7508: setmaxnreg is ignored. C7510 to C7512: `wgmma` products are serialised.
    assert!(!log.contains("C75"), "{log}");
    Assembled {
        registers: number_before(&log, " registers").unwrap_or_else(|| panic!("no registers in {log}")),
        spills: [" bytes spill stores", " bytes spill loads"]
            .map(|what| numbers_before(&log, what))
            .into_iter()
            .sum(),
        cubin,
    }
}

/// A kernel's machine code as text.
#[allow(dead_code, reason = "not every test reads machine code")]
pub fn disassemble(nvdisasm: &Path, kernel: &Assembled) -> String {
    let output = Command::new(nvdisasm).arg("-c").arg(&kernel.cubin.0).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The instructions of many kernels, from one call: the disassembler takes longer to start than to read all
/// kernels.
#[allow(dead_code, reason = "not every test reads machine code")]
pub fn disassemble_all(nvdisasm: &Path, codes: &[Vec<u8>]) -> Vec<Vec<String>> {
    /// Bytes of an instruction.
    const INSTRUCTION: usize = 16;
    let file = scratch("bin");
    std::fs::write(&file.0, codes.concat()).unwrap();
    let output = Command::new(nvdisasm).args(["-ndf", "-b", "SM90a"]).arg(&file.0).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    let mut instructions = text.lines().filter(|line| line.trim_start().starts_with("/*"));
    let of = |code: &Vec<u8>| {
        let own: Vec<_> = instructions.by_ref().take(code.len() / INSTRUCTION).map(str::to_owned).collect();
        assert_eq!(own.len() * INSTRUCTION, code.len(), "an instruction is a line");
        own
    };
    codes.iter().map(of).collect()
}

/// The sum of the numbers before `what` in the log, one for each entry.
fn numbers_before(log: &str, what: &str) -> u32 {
    let ends: Vec<usize> = log.match_indices(what).map(|(end, _)| end + what.len()).collect();
    assert!(!ends.is_empty(), "no{what} in {log}");
    let starts = std::iter::once(0).chain(ends.iter().copied());
    starts.zip(&ends).filter_map(|(start, &end)| number_before(&log[start..end], what)).sum()
}

/// The number before `what` in the log.
fn number_before(log: &str, what: &str) -> Option<u32> {
    let before = &log[..log.find(what)?];
    before.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}
