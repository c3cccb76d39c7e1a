import { card } from "./base.js";

/** The page of a plan. */
export function drawPlan(found, live) {
  return card("Plan");
}
