import { card } from "./base.js";

/** The page of a run. */
export function drawRun(found, live) {
  return card("Run");
}
