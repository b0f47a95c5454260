//! The findings of an earlier check, which fail no check: `--baseline FILE.sarif`.

use std::collections::HashMap;
use std::path::Path;

use emu::HazardKind;
use host::store;
use serde_json::Value;

use crate::error::CliError;
use crate::sarif::uri;

/// The kinds of known findings by the URI of their file and the text of their line.
#[derive(Default)]
pub struct Baseline(HashMap<(String, String), Vec<HazardKind>>);

impl Baseline {
    /// Reads a log that `--sarif` wrote.
    pub fn read(path: &Path) -> Result<Baseline, CliError> {
        let text = store::read_text(path)?;
        let log: Value = serde_json::from_str(&text).unwrap_or_default();
        let Some(runs) = log["runs"].as_array() else {
            return Err(CliError::Argument {
                argument: "--baseline",
                value: path.display().to_string(),
                accepted: "a file that --sarif wrote".to_owned(),
            });
        };
        let mut known: HashMap<_, Vec<_>> = HashMap::new();
        let results = runs.iter().filter_map(|run| run["results"].as_array()).flatten();
        for result in results.filter(|result| result["level"] == "error") {
            let Ok(kind) = serde_json::from_value(result["ruleId"].clone()) else { continue };
            let place = &result["locations"][0]["physicalLocation"];
            let text = place["region"]["snippet"]["text"].as_str();
            if let (Some(file), Some(text)) = (place["artifactLocation"]["uri"].as_str(), text) {
                // PTX without line information has no files, and a finding has a line of the PTX.
                let file = if file.ends_with(".ptx") { "" } else { file };
                known.entry((file.to_owned(), text.trim().to_owned())).or_default().push(kind);
            }
        }
        Ok(Baseline(known))
    }

    /// The kinds of findings that are known at a line, each with the reason why it does not fail a check.
    pub fn kinds(&self, file: &str, text: &str) -> Vec<(HazardKind, String)> {
        if self.0.is_empty() {
            return Vec::new();
        }
        let kinds = self.0.get(&(uri(file), text.to_owned())).into_iter().flatten();
        kinds.map(|kind| (*kind, "the baseline has it".to_owned())).collect()
    }
}
