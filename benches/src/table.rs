//! Results as tables on screen.

use comfy_table::{ContentArrangement, Table, presets};

use crate::protocol::DECODE_ROWS;
use crate::results::{Results, Row, Weights};

const CALL: [&str; 5] = ["IMPLEMENTATION", "N", "K", "M", "US"];
const LOOP: [&str; 6] = ["IMPLEMENTATION", "WHAT", "SHAPE", "CONTEXT", "ROWS", "BINDING"];
const LOOP_TIMES: [&str; 7] =
    ["US", "FLOOR US", "FLOOR/TIME", "TOKENS/S", "LAUNCHES", "BEST PEER US", "BEST PEER"];
const DECODE: [&str; 6] = ["FLOOR US", "FLOOR/TIME", "GB/S", "NO OVERLAP US", "BEST PEER US", "BEST PEER"];
const PROMPT: [&str; 5] = ["TFLOP/S", "BF16 TFLOP/S", "BF16 PEER", "BEST PEER TFLOP/S", "BEST PEER"];

/// Our rows, each beside the fastest peer of the same weights; a prompt's rows beside BF16 weights too. Columns that nothing was
/// measured for are left out.
pub fn tables(results: &Results) -> String {
    let ours = results.rows.iter().filter(|row| row.id().is_some() && row.overlap);
    let (loops, projections): (Vec<&Row>, Vec<&Row>) = ours.partition(|row| row.is_of_loop());
    let (decode, prompt): (Vec<&Row>, Vec<&Row>) =
        projections.into_iter().partition(|row| row.m.is_none_or(|m| m <= DECODE_ROWS));
    let loops = loops.into_iter().map(|row| loop_cells(results, row));
    let decode =
        decode.into_iter().map(|row| call(row).into_iter().chain(decode_cells(results, row)).collect());
    let prompt =
        prompt.into_iter().map(|row| call(row).into_iter().chain(prompt_cells(results, row)).collect());

    let mut text = format!("{}, streaming read {:.0} GB/s\n", results.gpu, results.read_gbs);
    text += &table(&[&CALL[..], &DECODE].concat(), decode.collect());
    text += &table(&[&CALL[..], &PROMPT].concat(), prompt.collect());
    text += &table(&[&LOOP[..], &LOOP_TIMES].concat(), loops.collect());
    for missing in &results.unmeasured {
        let (peer, format, rows) = (&missing.peer, &missing.format, missing.rows);
        text += &format!("not measured: {peer} {format}, rows: {rows}: {}\n", missing.problem);
    }
    text.trim_end().to_string()
}

/// The columns that hold anything: their headings, and their cells row by row.
pub(crate) fn filled<'a>(headings: &[&'a str], rows: &'a [Vec<String>]) -> (Vec<&'a str>, Vec<Vec<&'a str>>) {
    let holds = |column: &usize| rows.iter().any(|row| !row[*column].is_empty());
    let columns: Vec<usize> = (0..headings.len()).filter(holds).collect();
    let cells = |row: &'a Vec<String>| columns.iter().map(|&column| row[column].as_str()).collect();
    (columns.iter().map(|&column| headings[column]).collect(), rows.iter().map(cells).collect())
}

fn table(headings: &[&str], rows: Vec<Vec<String>>) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let (headings, rows) = filled(headings, &rows);
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(headings).add_rows(rows);
    format!("{table}\n\n")
}

fn call(row: &Row) -> [String; 5] {
    let dim = |dim: Option<usize>| dim.map(|dim| dim.to_string()).unwrap_or_default();
    [row.id().unwrap_or_default().to_string(), dim(row.n), dim(row.k), dim(row.m), us(row)]
}

fn loop_cells(results: &Results, row: &Row) -> Vec<String> {
    let dim = |dim: Option<usize>| dim.map(|dim| dim.to_string()).unwrap_or_default();
    let best = results.best_peer_of_any(row);
    vec![
        row.id().unwrap_or_default().to_string(),
        row.what.clone(),
        row.shape.clone().unwrap_or_default(),
        dim(row.ctx),
        dim(row.rows),
        row.binding.clone().unwrap_or_default(),
        us(row),
        format!("{:.2}", row.floor_us),
        format!("{:.3}", row.ratio),
        row.tok_s.map(|tok_s| format!("{tok_s:.1}")).unwrap_or_default(),
        dim(row.launches),
        best.map(us).unwrap_or_default(),
        best.map(name).unwrap_or_default(),
    ]
}

fn decode_cells(results: &Results, row: &Row) -> [String; 6] {
    let best = row.weights().and_then(|weights| results.best_peer(row, weights));
    [
        format!("{:.2}", row.floor_us),
        format!("{:.3}", row.ratio),
        format!("{:.0}", row.ratio * results.read_gbs),
        results.without_overlap(row).map(us).unwrap_or_default(),
        best.map(us).unwrap_or_default(),
        best.map(name).unwrap_or_default(),
    ]
}

fn prompt_cells(results: &Results, row: &Row) -> [String; 5] {
    let bf16 = results.best_peer(row, Weights::Bf16);
    let best = row.weights().and_then(|weights| results.best_peer(row, weights));
    [
        tflops(row),
        bf16.map(tflops).unwrap_or_default(),
        bf16.map(name).unwrap_or_default(),
        best.map(tflops).unwrap_or_default(),
        best.map(name).unwrap_or_default(),
    ]
}

fn us(row: &Row) -> String {
    format!("{:.2}", row.us)
}

fn tflops(row: &Row) -> String {
    row.tflops().map(|tflops| format!("{tflops:.0}")).unwrap_or_default()
}

/// A peer, its version and its format.
fn name(peer: &Row) -> String {
    format!("{} {}", peer.peer().unwrap_or_default(), peer.format.as_deref().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::{Callee, samples};

    /// The words of each line, and nothing of their alignment.
    fn lines(results: &Results) -> Vec<String> {
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        tables(results).lines().map(words).filter(|line| !line.is_empty()).collect()
    }

    #[test]
    fn ours_stand_beside_the_best_peer_of_the_same_weights() {
        assert_eq!(
            lines(&samples::results()),
            [
                "NVIDIA Test, streaming read 1000 GB/s",
                "IMPLEMENTATION N K M US FLOOR US FLOOR/TIME GB/S NO OVERLAP US BEST PEER US BEST PEER",
                "linear_proj/w8a16_static 6250 2000 1 20.00 12.50 0.625 625 25.00 30.00 humming 0.1.20 w8a16",
                "linear_proj/w8a16_static 6250 2000 16 31.25 12.50 0.400 400",
                "linear_proj/nvfp4_dynamic 6250 2000 1 50.00 12.50 0.250 250",
                "IMPLEMENTATION N K M US TFLOP/S BF16 TFLOP/S BF16 PEER BEST PEER TFLOP/S BEST PEER",
                "linear_proj/nvfp4_dynamic 6250 2000 2048 64.00 800 640 cublas 13.1 bf16 400 humming 0.1.20 nvfp4_w4a16",
                "not measured: gemlite 0.6 nvfp4_w4a16, rows: 35: NotImplementedError: no",
            ]
        );
    }

    #[test]
    fn calls_of_a_loop_have_a_table_of_their_own() {
        let attention = Row::new("decode_loop/fp8_kv", "attention", 20.0, 10e6, 1000.0);
        let peer = Row::new("", "attention", 25.0, 10e6, 1000.0).of_loop("24/4/256", 1, Some(4096));
        let callee = Callee::Peer("xqa 0.6".to_string());
        let peer = Row { callee, format: Some("fp8".to_string()), ..peer };
        let mut results = samples::results();
        results.unmeasured.clear();
        results.rows = vec![attention.of_loop("24/4/256", 1, Some(4096)), peer];
        assert_eq!(
            lines(&results),
            [
                "NVIDIA Test, streaming read 1000 GB/s",
                "IMPLEMENTATION WHAT SHAPE CONTEXT ROWS US FLOOR US FLOOR/TIME BEST PEER US BEST PEER",
                "decode_loop/fp8_kv attention 24/4/256 4096 1 20.00 10.00 0.500 25.00 xqa 0.6 fp8",
            ]
        );
    }

    #[test]
    fn columns_that_nothing_was_measured_for_are_left_out() {
        let mut results = samples::results();
        results.rows.retain(|row| row.id() == Some("linear_proj/w8a16_static") && row.overlap);
        results.unmeasured.clear();
        assert_eq!(
            lines(&results),
            [
                "NVIDIA Test, streaming read 1000 GB/s",
                "IMPLEMENTATION N K M US FLOOR US FLOOR/TIME GB/S",
                "linear_proj/w8a16_static 6250 2000 1 20.00 12.50 0.625 625",
                "linear_proj/w8a16_static 6250 2000 16 31.25 12.50 0.400 400",
            ]
        );
    }
}
