//! Compares the machine code of the default plans on a grid of problems, and of every tuned plan, with the
//! hashes in `filetests/machine_code.txt`.
//!
//! Each line of that file describes a kernel: the hash of its PTX text, the hash of the machine code that
//! ptxas generates for that text, and the problem. One version of ptxas always generates the same machine
//! code for the same text. A kernel whose text has the committed hash is therefore not assembled again,
//! except for one kernel in [`SAMPLED`]. A kernel whose text differs passes if its machine code has the
//! committed hash. `BLESS_MACHINE_CODE=1 cargo test -p flashcore-kernels --test all machine_code::` writes
//! the file.

use crate::tools::{self, hash};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::PathBuf;

use crate::common::each::each;
use flashcore_kernels::select::TunedTable;
use flashcore_kernels::{Arch, Family, Plan, emit};
use problem::{Band, DType, Layout, Pass, PassKind, Problem};
use ptx::Kernel;

/// Of the kernels whose text has the committed hash, one in this many is assembled anyway.
const SAMPLED: usize = 16;
/// A length that no block divides.
const RAGGED: usize = 1000;
/// First word of the line that names the version of ptxas.
const VERSION: &str = "ptxas";

/// A kernel's text with the problem for which it was emitted.
struct Case {
    key: String,
    text: String,
    kernel: Kernel,
}

impl Case {
    fn new(source: &str, problem: &Problem, plan: &Plan, arch: &Arch) -> Case {
        let kernel = emit(problem, plan, arch).unwrap_or_else(|e| panic!("{source} {plan:?}: {e}")).kernel(0);
        let (p, lse) = (problem, if problem.pass.lse() { " lse" } else { "" });
        let rows = format!("B{} H{}/{} S{}×{}", p.batch, p.heads_q, p.heads_kv, p.seq_q, p.seq_kv);
        let (target, family) = (kernel.module.target, plan.family());
        let of_dims = format!("D{}/{} {}{lse}", p.head_dim, p.head_dim_v, p.band);
        let key = format!("{source} {target} {family} {} {rows} {of_dims}", p.dtypes);
        Case { key, text: hash(kernel.module.to_string().as_bytes()), kernel }
    }
}

/// Problems with different default plans: short, long, ragged, grouped, with a single query, with few and
/// with many rows.
fn problems(dtype: DType) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (dim, dim_v) in
        [(32, 32), (64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)]
    {
        for mask in [Band::FULL, Band::CAUSAL] {
            for (batch, heads, seq_q, seq_kv) in [
                (1, (8, 8), 512, 512),
                (4, (16, 16), 512, 512),
                (2, (16, 16), RAGGED, RAGGED),
                (8, (32, 8), 2048, 2048),
                (1, (16, 16), 16384, 16384),
                (2, (32, 8), 1, 4096),
            ] {
                let mut problem = Problem::new(batch, heads.0, seq_q, dim, dtype).with_band(mask);
                (problem.heads_kv, problem.head_dim_v) = (heads.1, dim_v);
                problems.push(problem.with_seq_kv(seq_kv, Layout::Bshd));
            }
        }
        let more_rows = Problem::new(1, 16, RAGGED, dim, dtype).with_band(Band::CAUSAL_TOP_LEFT);
        let more_rows = Problem { head_dim_v: dim_v, ..more_rows };
        problems.push(more_rows.with_seq_kv(300, Layout::Bshd));
    }
    problems
}

/// Default plans of each family for each architecture. On sm_90, one of the shapes also has the LSE. The
/// other architectures have only the family `mma`, whose plans hardly differ between them, so fewer problems
/// suffice. Problems with 8-bit inputs use that family. Ragged problems also have the backward pass.
fn default_cases() -> Vec<Case> {
    let dtypes = [DType::F16, DType::Bf16, DType::E4m3];
    let problems: Vec<Problem> = dtypes.into_iter().flat_map(problems).collect();
    let of_problem = |problem: &Problem| {
        let mut cases = Vec::new();
        for arch in Arch::ALL {
            let lse: &[bool] = match (arch.sm, problem.dtypes.q) {
                (89 | 120, DType::E4m3) if [64, 128, 256].contains(&problem.head_dim) => &[false],
                (_, DType::E4m3) => &[],
                (90, _) if problem.seq_q == RAGGED => &[false, true],
                (90, _) => &[false],
                (80, DType::F16) => &[true],
                (80, _) => &[false],
                (_, DType::Bf16) if problem.head_dim.is_power_of_two() => &[false],
                _ => &[],
            };
            let forward = Family::of_pass(PassKind::Forward)
                .flat_map(|family| lse.iter().map(move |&lse| (family, problem.clone().with_lse(lse))));
            let trained = problem.seq_q == RAGGED
                && matches!((arch.sm, problem.dtypes.q), (80 | 90 | 120, DType::Bf16));
            let backward = Family::of_pass(PassKind::Backward).filter(|_| trained).map(|family| {
                let pass = match family {
                    Family::BackwardFused => Pass::BACKWARD,
                    _ => Pass::DETERMINISTIC,
                };
                (family, problem.clone().with_pass(pass))
            });
            for (family, problem) in forward.chain(backward) {
                let plan = family.default_for(&problem, &arch).ok();
                cases.extend(plan.map(|plan| Case::new("default", &problem, &plan, &arch)));
            }
            let ordered = problem.clone().with_pass(Pass::DETERMINISTIC);
            let plan = Family::BackwardFused.default_for(&ordered, &arch).ok().filter(|_| trained);
            cases.extend(plan.map(|plan| Case::new("ordered", &ordered, &plan, &arch)));
        }
        cases
    };
    each(&problems, of_problem).into_iter().flatten().collect()
}

/// Latent attention of 128 heads, in pages and dense.
fn latent_cases() -> Vec<Case> {
    let of = |dtype| Problem { heads_kv: 1, ..Problem::new(4, 128, 1, 576, dtype) };
    let of = |dtype| of(dtype).with_seq_kv(4096, Layout::Bshd).with_v_in_k(512);
    let problems = [(0, DType::F16), (64, DType::Bf16), (1, DType::Bf16)].map(|(page, dtype)| match page {
        0 => of(dtype),
        _ => of(dtype).with_pages(page, 4 * 4096 / page).with_v_in_k(512),
    });
    let of_arch = |&arch: &Arch| {
        problems.each_ref().map(|problem| {
            let plan = Plan::default_for(problem, &arch).unwrap();
            Case::new("latent", problem, &plan, &arch)
        })
    };
    Arch::ALL.iter().filter(|arch| [80, 90].contains(&arch.sm)).flat_map(of_arch).collect()
}

/// The plans of all tuned tables on their own problems.
fn tuned_cases() -> Vec<Case> {
    let rows = TunedTable::builtin().rows();
    each(rows, |row| {
        let arch = Arch::of(row.sm).expect("the table was read");
        Case::new("tuned", &row.problem.problem(), &row.plan, &arch)
    })
}

/// All kernels with unique keys. If a problem has several plans, the keys of the later ones end in a number.
fn cases() -> Vec<Case> {
    let mut cases = default_cases();
    cases.extend(latent_cases());
    cases.extend(tuned_cases());
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    for case in &mut cases {
        let count = seen.entry(case.key.clone()).or_default();
        *count += 1;
        if *count > 1 {
            write!(case.key, " #{count}").unwrap();
        }
    }
    cases
}

/// Hashes by key.
type Golden = BTreeMap<String, Hashes>;

/// The hash of a kernel's text, and that of its machine code.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Hashes {
    text: String,
    code: String,
}

/// Parses the committed file: the version of ptxas, and the kernels.
fn read(text: &str) -> (String, Golden) {
    let mut version = String::new();
    let mut golden = Golden::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let mut words = line.splitn(3, ' ');
        match (words.next(), words.next(), words.next()) {
            (Some(VERSION), ..) => line[VERSION.len()..].trim().clone_into(&mut version),
            (Some(text), Some(code), Some(key)) => {
                let hashes = Hashes { text: text.to_owned(), code: code.to_owned() };
                assert!(golden.insert(key.to_owned(), hashes).is_none(), "{key} stands twice");
            }
            _ => panic!("not a line of hashes: {line}"),
        }
    }
    (version, golden)
}

/// The text of the file for these kernels.
fn file(version: &str, golden: &Golden) -> String {
    let mut text =
        String::from("# PTX text, machine code, kernel: see crates/kernels/tests/all/machine_code.rs\n");
    writeln!(text, "{VERSION} {version}").unwrap();
    for (key, Hashes { text: ptx, code }) in golden {
        writeln!(text, "{ptx} {code} {key}").unwrap();
    }
    text
}

struct Assembler {
    ptxas: PathBuf,
    version: String,
}

impl Assembler {
    /// ptxas at the path that the environment names.
    fn find() -> Option<Assembler> {
        let ptxas = tools::find("FLASHCORE_PTXAS")?;
        Some(Assembler { version: tools::version(&ptxas), ptxas })
    }

    /// The hash of a kernel's machine code and register count.
    fn code(&self, case: &Case) -> String {
        let assembled = tools::assemble(&self.ptxas, &case.kernel);
        let mut bytes = assembled.code();
        bytes.extend(assembled.registers.to_le_bytes());
        hash(&bytes)
    }

    /// The hashes of these kernels, in order; each text is assembled once.
    fn codes(&self, cases: &[&Case]) -> Vec<String> {
        let distinct: BTreeMap<&str, &Case> = cases.iter().map(|case| (&*case.text, *case)).collect();
        let distinct: Vec<(&str, &Case)> = distinct.into_iter().collect();
        let codes = each(&distinct, |(text, case)| (*text, self.code(case)));
        let codes: BTreeMap<&str, String> = codes.into_iter().collect();
        cases.iter().map(|case| codes[&*case.text].clone()).collect()
    }
}

/// The differences from the committed file, one line per kernel.
fn differences(cases: &[Case], golden: &Golden, version: &str, assembler: Option<&Assembler>) -> Vec<String> {
    let mut found = Vec::new();
    let committed = |case: &Case| golden.get(&case.key);
    let keys: BTreeSet<&str> = cases.iter().map(|case| &*case.key).collect();
    found.extend(
        golden.keys().filter(|key| !keys.contains(&***key)).map(|key| format!("no longer emitted: {key}")),
    );
    found.extend(
        cases.iter().filter(|case| committed(case).is_none()).map(|case| format!("new: {}", case.key)),
    );
    let (same, changed): (Vec<&Case>, Vec<&Case>) = cases
        .iter()
        .filter(|case| committed(case).is_some())
        .partition(|case| committed(case).is_some_and(|hashes| hashes.text == case.text));
    let Some(assembler) = assembler.filter(|assembler| assembler.version == version) else {
        eprintln!("no ptxas of \"{version}\": PTX texts alone are compared");
        found.extend(changed.iter().map(|case| format!("PTX text differs: {}", case.key)));
        return found;
    };
    let sampled = same.into_iter().step_by(SAMPLED);
    let assembled: Vec<&Case> = changed.iter().copied().chain(sampled).collect();
    let codes = assembler.codes(&assembled);
    let differs = |(case, code): &(&&Case, &String)| golden[&case.key].code != **code;
    let different = assembled.iter().zip(&codes).filter(differs);
    found.extend(different.map(|(case, _)| format!("machine code differs: {}", case.key)));
    eprintln!(
        "{} kernels; the PTX text of {} differs; {} assembled or known",
        cases.len(),
        changed.len(),
        codes.len()
    );
    found
}

#[test]
fn machine_code_is_the_committed_one() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../filetests/machine_code.txt");
    let cases = cases();
    let assembler = Assembler::find();
    if std::env::var_os("BLESS_MACHINE_CODE").is_some() {
        let assembler = assembler.as_ref().expect("FLASHCORE_PTXAS names the ptxas to bless with");
        // A text of the file keeps its machine code, if the file is of this ptxas.
        let (version, known) = read(&std::fs::read_to_string(&path).unwrap());
        let known = if version == assembler.version { known } else { Golden::new() };
        let (kept, new): (Vec<&Case>, Vec<&Case>) = cases
            .iter()
            .partition(|case| known.get(&case.key).is_some_and(|hashes| hashes.text == case.text));
        let hashes = new.iter().zip(assembler.codes(&new));
        let hashes = hashes.map(|(case, code)| (case.key.clone(), Hashes { text: case.text.clone(), code }));
        let kept = kept.iter().map(|case| (case.key.clone(), known[&case.key].clone()));
        let golden: Golden = hashes.chain(kept).collect();
        std::fs::write(&path, file(&assembler.version, &golden)).unwrap();
    }
    let (version, golden) = read(&std::fs::read_to_string(&path).unwrap());
    let found = differences(&cases, &golden, &version, assembler.as_ref());
    assert!(
        found.is_empty(),
        "{} kernels are not those of {}:\n{}",
        found.len(),
        path.display(),
        found.join("\n")
    );
}

/// A kernel whose text or machine code differs from the committed one is named.
#[test]
fn other_kernels_are_named() {
    let problem = Problem::mission();
    let plan = Family::Mma.default_for(&problem, &Arch::SM_80).unwrap();
    let [case, other] =
        [false, true].map(|lse| Case::new("test", &problem.clone().with_lse(lse), &plan, &Arch::SM_80));
    let hashes = |case: &Case, code: &str| Hashes { text: case.text.clone(), code: code.to_owned() };
    let keys = [case.key.clone(), other.key.clone()];
    let golden: Golden = [(case.key.clone(), hashes(&case, "0"))].into();
    let cases = [case, other];
    assert_eq!(read(&file("version 1", &golden)), ("version 1".to_owned(), golden.clone()));
    assert_eq!(differences(&cases, &golden, "", None), [format!("new: {}", keys[1])]);
    let swapped: Golden =
        [(keys[0].clone(), hashes(&cases[1], "0")), ("gone".to_owned(), hashes(&cases[0], "0"))].into();
    let expected = ["no longer emitted: gone".to_owned(), format!("PTX text differs: {}", keys[0])];
    assert_eq!(differences(&cases[..1], &swapped, "", None), expected);
    let Some(assembler) = Assembler::find() else { return };
    let with = |golden: &Golden| differences(&cases[..1], golden, &assembler.version, Some(&assembler));
    assert_eq!(with(&golden), [format!("machine code differs: {}", keys[0])], "an unchanged text is sampled");
    let code = assembler.code(&cases[0]);
    let right: Golden = [(keys[0].clone(), hashes(&cases[1], &code))].into();
    assert_eq!(with(&right), [""; 0], "another text of one machine code");
}
