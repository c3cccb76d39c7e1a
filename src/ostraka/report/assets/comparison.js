import { card } from "./base.js";

/** The page of a comparison. */
export function drawComparison(found, live) {
  return card("Comparison");
}
