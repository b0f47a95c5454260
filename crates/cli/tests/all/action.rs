//! The script of the GitHub action that checks the kernels of a repository.

use std::path::Path;
use std::process::{Command, Output};

use crate::folder::{Folder, text};

/// The script of the action's step that checks, from its YAML: the lines below the last `run: |`.
fn script() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.github/actions/check/action.yml");
    let action = std::fs::read_to_string(path).unwrap();
    let (_, script) = action.rsplit_once("      run: |\n").unwrap();
    script.lines().map(|line| line.strip_prefix("        ").unwrap_or(line)).collect::<Vec<_>>().join("\n")
}

const LAUNCH: &str = "[launch]\ngrid = [1]\nblock = [64]\n[[arg]]\nname = \"x\"\nrole = \"buffer\"\ndtype = \"u32\"\n\
                      elements = 64\ninit = \"zeros\"\n";

/// All threads store their number at the address that the text computes.
fn kernel(address: &str) -> String {
    format!(
        ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 x)\n{{\n\
         .reg .b32 %r<2>; .reg .b64 %d<3>;\nld.param.u64 %d1, [x];\nmov.u32 %r1, %tid.x;\n\
         mul.wide.u32 %d2, %r1, 4;\n{address}\nst.global.u32 [%d1], %r1;\nret;\n}}\n"
    )
}

fn run(folder: &Folder) -> Output {
    let command = Path::new(env!("CARGO_BIN_EXE_flashcore")).parent().unwrap();
    let path = format!("{}:{}", command.display(), std::env::var("PATH").unwrap());
    let mut bash = Command::new("bash");
    // As a runner of GitHub does.
    bash.args(["--noprofile", "--norc", "-eo", "pipefail", "-c", &script()]).current_dir(&folder.0);
    let inputs =
        [("KERNELS", "kernels"), ("BASELINE", ".flashcore"), ("REPORTS", "reports"), ("OPTIONS", "--quick")];
    bash.env("PATH", path).envs(inputs).output().unwrap()
}

#[test]
fn new_findings_fail_and_those_of_the_baseline_do_not() {
    let folder = Folder::new("action");
    std::fs::create_dir(folder.0.join("kernels")).unwrap();
    for name in ["right", "racy"] {
        folder.write(&format!("kernels/{name}.toml"), LAUNCH);
    }
    folder.write("kernels/right.ptx", &kernel("add.s64 %d1, %d1, %d2;"));
    folder.write("kernels/racy.ptx", &kernel(""));
    let ran = run(&folder);
    assert_eq!(ran.status.code(), Some(1), "{}{}", text(&ran.stdout), text(&ran.stderr));
    for report in ["sarif/right.sarif", "sarif/racy.sarif", "junit/right.xml", "junit/racy.xml"] {
        assert!(folder.0.join("reports").join(report).exists(), "{report}: {}", text(&ran.stderr));
    }
    std::fs::create_dir(folder.0.join(".flashcore")).unwrap();
    std::fs::copy(folder.0.join("reports/sarif/racy.sarif"), folder.0.join(".flashcore/racy.sarif")).unwrap();
    let ran = run(&folder);
    assert_eq!(ran.status.code(), Some(0), "{}{}", text(&ran.stdout), text(&ran.stderr));
    // A new finding beside the known one.
    folder.write("kernels/racy.ptx", &kernel("add.s64 %d2, %d1, %d2;\nst.global.u32 [%d2+4], %r1;"));
    assert_eq!(run(&folder).status.code(), Some(1));
    // A comment in the source allows one.
    folder.write("kernels/racy.ptx", &kernel("// flashcore: allow race because any number will do"));
    std::fs::remove_dir_all(folder.0.join(".flashcore")).unwrap();
    let ran = run(&folder);
    assert_eq!(ran.status.code(), Some(0), "{}{}", text(&ran.stdout), text(&ran.stderr));
}
