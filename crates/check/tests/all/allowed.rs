//! Tests comments that allow a finding: `// flashcore: allow KIND because REASON`.

use emu::HazardKind;
use flashcore_check::gate::{CheckReport, Settings, Verdict, check_kernel};
use flashcore_check::launchfile::LaunchSpec;
use flashcore_check::sources::{CommentError, Sources};

/// Thread 0 of each of four CTAs stores another number to one word. `above` is a line above the store.
fn racy(above: &str) -> String {
    format!(
        ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 y)\n{{\n.reg .b64 %rd<3>;\n\
         .reg .b32 %r<3>;\nld.param.u64 %rd1, [y];\nmov.u32 %r1, %ctaid.x;\n{above}\nst.global.u32 [%rd1], %r1;\n\
         ret;\n}}\n"
    )
}

const LAUNCH: &str = "[launch]\ngrid = [4]\nblock = [1]\n[[arg]]\nname = \"y\"\nrole = \"buffer\"\ndtype = \"i32\"\n\
                      elements = 1\n";

fn check(text: &str) -> Result<CheckReport, CommentError> {
    let bound =
        LAUNCH.parse::<LaunchSpec>().unwrap().bind(ptx::parse(text).unwrap().verify().unwrap()).unwrap();
    let allowed = Sources::from(text.to_owned()).allowed(|_, _| Vec::new())?;
    Ok(check_kernel(&bound, &Settings { allowed, ..Settings::quick() }).unwrap())
}

#[test]
fn a_finding_that_a_comment_allows_is_a_note() {
    let failed = check(&racy("")).unwrap();
    assert_eq!(failed.verdict, Verdict::Failed);
    assert!(failed.hazards.iter().any(|hazard| hazard.kind == HazardKind::Race), "{:#?}", failed.hazards);
    let passed = check(&racy("// flashcore: allow race because any CTA may be the last")).unwrap();
    assert_eq!((passed.verdict, passed.hazards.len()), (Verdict::Passed, 0), "{:?}", passed.reasons);
    let note = passed.notes.iter().find(|note| note.kind == HazardKind::Race).unwrap();
    assert!(
        note.allowed && note.message.ends_with("PTX:10 allows it because any CTA may be the last"),
        "{note}"
    );
}

/// A comment allows one kind at one line.
#[test]
fn other_findings_fail() {
    let other_kind = check(&racy("// flashcore: allow misaligned because it is not")).unwrap();
    assert_eq!(other_kind.verdict, Verdict::Failed);
    let other_line = racy("// flashcore: allow race because of the line below\nmov.u32 %r2, 0;");
    assert_eq!(check(&other_line).unwrap().verdict, Verdict::Failed);
}

#[test]
fn a_comment_that_cannot_be_read_is_an_error() {
    for comment in ["races because any may be the last", "race", "race because "] {
        let error = check(&racy(&format!("// flashcore: allow {comment}"))).unwrap_err();
        let said = error.to_string();
        assert_eq!((&*error.file, error.line), ("PTX", 10), "{said}");
        assert!(
            said.contains("`flashcore: allow KIND because REASON`")
                && said.contains("race, uninitialised_read, out_of")
        );
    }
}
