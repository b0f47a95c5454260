//! Rows whose problem is a name, such as those of features and of the kernels that quantise tensors.

use bench::OURS;
use serde::Deserialize;

use super::render::place_of;

/// The fields of a row that the tables show. A suite has some of the optional ones.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Named {
    pub(super) suite: String,
    pub(super) problem: String,
    #[serde(rename = "impl")]
    pub(super) implementation: String,
    pub(super) us_median: Option<f64>,
    pub(super) tflops: Option<f64>,
    pub(super) gbps: Option<f64>,
    /// The rate in that of a copy of as many bytes.
    pub(super) of_copy: Option<f64>,
    pub(super) ratio: Option<f64>,
    pub(super) ratio_low: Option<f64>,
    pub(super) ratio_high: Option<f64>,
    pub(super) fault: Option<String>,
    /// The rate at which the kernel reads what it must, where reading limits it.
    tb_per_s: Option<f64>,
    device: String,
    driver: String,
    pub(super) commit: Option<String>,
    pub(super) run: String,
    pub(super) when: String,
}

impl Named {
    pub(super) fn is_ours(&self) -> bool {
        self.implementation == OURS
    }

    /// The rate of reading, TB/s, if the output was right.
    pub(super) fn rate(&self) -> Option<f64> {
        self.tb_per_s.filter(|_| self.fault.is_none())
    }

    pub(super) fn device(&self) -> &str {
        &self.device
    }

    /// The median time as `number` writes it, or that the output was wrong.
    pub(super) fn time(&self, number: impl Fn(Option<f64>) -> String) -> String {
        self.fault.as_ref().map_or_else(|| number(self.us_median), |_| "n/a".to_owned())
    }

    /// The source of the row's figures.
    pub(super) fn place(&self) -> String {
        place_of(&self.device, &self.driver, self.commit.as_deref(), &self.when)
    }
}

/// The sources of the figures of rows, each once, in the order of the rows.
pub(super) fn places<'a>(rows: impl IntoIterator<Item = &'a Named>) -> Vec<String> {
    let mut places: Vec<String> = Vec::new();
    for place in rows.into_iter().map(Named::place) {
        if !places.contains(&place) {
            places.push(place);
        }
    }
    places
}
